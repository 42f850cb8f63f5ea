"""One INIT worker as a process: `python -m stages.init`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.envhost.client import HttpEnvHosts
from infra.envhost.patient import PatientHosts
from infra.stage import Member
from stages.init.stage import InitStage
from stages.process import Surroundings, guards_of, stage_command
from stages.wiring import init_stage


@asynccontextmanager
async def member(around: Surroundings) -> AsyncIterator[Member]:
    """Give a member of the stage's group that is connected to the environment host."""
    config, guards = around.config, guards_of(around, "init")
    hosts = PatientHosts(HttpEnvHosts(clock=around.clock), around.clock, guards)
    stage = InitStage(hosts.at(config.envhost.address), outage_s=config.breaker.longest_s)
    try:
        yield around.member(init_stage(stage.handle), config.init, first=True, outages=guards)
    finally:
        await hosts.disconnect()


command = stage_command("init", member)

if __name__ == "__main__":
    command()
