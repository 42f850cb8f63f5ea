"""One RUN worker as a process: `python -m stages.run`."""

from __future__ import annotations

from infra.bus import Bus
from infra.clock import Clock
from infra.config import Config
from infra.envhost.client import HttpEnvHosts
from infra.inference.patient import PatientPolicy
from infra.inference.vllm import VllmClient
from infra.stage import Member
from stages.process import run_member, stage_command
from stages.run.render import Renderer
from stages.run.stage import RunStage
from stages.wiring import run_stage


async def work(bus: Bus, clock: Clock, config: Config, worker: str) -> None:
    """Run one member of the stage's group until it is stopped."""
    hosts, policy = HttpEnvHosts(clock=clock), VllmClient(config.policy.url, model=config.policy.name)
    run = RunStage(
        hosts=hosts,
        policy=PatientPolicy(policy, clock, wait_s=config.policy.wait_s),
        renderer=Renderer(config.policy.model),
        clock=clock,
        worker=worker,
        backend=config.policy.url,
    )
    try:
        await run_member(Member(run_stage(run.handle), bus, clock, worker=worker, limits=config.run.limits()))
    finally:
        await hosts.disconnect()
        await policy.close()


command = stage_command("run", work)

if __name__ == "__main__":
    command()
