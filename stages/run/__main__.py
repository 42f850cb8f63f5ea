"""One RUN worker as a process: `python -m stages.run`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.envhost.client import HttpEnvHosts
from infra.envhost.patient import PatientHosts
from infra.inference.backends import registered
from infra.inference.pool import PolicyPool
from infra.inference.vllm import VllmClient
from infra.stage import Member
from stages.process import Surroundings, guards_of, stage_command
from stages.run.proxy import Proxy
from stages.run.render import Renderer
from stages.run.stage import RunStage
from stages.wiring import run_stage


@asynccontextmanager
async def member(around: Surroundings) -> AsyncIterator[Member]:
    """Give a member of the stage's group that is connected to the environment hosts and the policy."""
    settings, clock, guards = around.config.policy, around.clock, guards_of(around, "run")
    hosts, renderer = HttpEnvHosts(clock=clock), Renderer(settings.model)

    def connect(url: str) -> VllmClient:
        return VllmClient(url, model=settings.name, generate_timeout_s=settings.generate_timeout_s)

    pool = PolicyPool(connect, clock, guards, wait_s=settings.wait_s, tokenizer_digest=renderer.digest)
    proxy = Proxy(policy=pool, renderer=renderer, clock=clock, config=around.config.proxy, model=settings.name)
    run = RunStage(
        hosts=PatientHosts(hosts, clock, guards),
        policy=pool,
        renderer=renderer,
        clock=clock,
        worker=around.worker,
        proxy=proxy,
    )
    try:
        async with proxy, registered(pool, around.bus, clock, url=settings.url):
            yield around.member(run_stage(run.handle, run.withdraw), around.config.run, outages=guards)
    finally:
        await hosts.disconnect()


command = stage_command("run", member)

if __name__ == "__main__":
    command()
