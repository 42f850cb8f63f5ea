"""One RUN worker as a process: `python -m stages.run`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.envhost.client import HttpEnvHosts
from infra.envhost.patient import PatientHosts
from infra.inference.patient import patient_policy
from infra.inference.vllm import VllmClient
from infra.stage import Member
from stages.process import Surroundings, guards_of, stage_command
from stages.run.render import Renderer
from stages.run.stage import RunStage
from stages.wiring import run_stage


@asynccontextmanager
async def member(around: Surroundings) -> AsyncIterator[Member]:
    """Give a member of the stage's group that is connected to the environment hosts and the policy."""
    settings, clock, guards = around.config.policy, around.clock, guards_of(around, "run")
    hosts, policy = (
        HttpEnvHosts(clock=clock),
        VllmClient(settings.url, model=settings.name, generate_timeout_s=settings.generate_timeout_s),
    )
    run = RunStage(
        hosts=PatientHosts(hosts, clock, guards),
        policy=patient_policy(policy, settings.url, clock, guards, wait_s=settings.wait_s),
        renderer=Renderer(settings.model),
        clock=clock,
        worker=around.worker,
        backend=settings.url,
    )
    try:
        yield around.member(run_stage(run.handle, run.withdraw), around.config.run, outages=guards)
    finally:
        await hosts.disconnect()
        await policy.close()


command = stage_command("run", member)

if __name__ == "__main__":
    command()
