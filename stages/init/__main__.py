"""One INIT worker as a process: `python -m stages.init`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.envhost.client import HttpEnvHost
from infra.stage import Member
from stages.init.stage import InitStage
from stages.process import Surroundings, stage_command
from stages.wiring import init_stage


@asynccontextmanager
async def member(around: Surroundings) -> AsyncIterator[Member]:
    """Give a member of the stage's group that is connected to the environment host."""
    host = HttpEnvHost(around.config.envhost.address, clock=around.clock)
    try:
        yield around.member(init_stage(InitStage(host).handle), around.config.init.limits(), first=True)
    finally:
        await host.disconnect()


command = stage_command("init", member)

if __name__ == "__main__":
    command()
