"""One INIT worker as a process: `python -m stages.init`."""

from __future__ import annotations

from infra.bus import Bus
from infra.clock import Clock
from infra.config import Config
from infra.envhost.client import HttpEnvHost
from infra.stage import Member
from stages.init.stage import InitStage
from stages.process import run_member, stage_command
from stages.wiring import init_stage


async def work(bus: Bus, clock: Clock, config: Config, worker: str) -> None:
    """Run one member of the stage's group until it is stopped."""
    host = HttpEnvHost(config.envhost.address, clock=clock)
    init = init_stage(InitStage(host).handle)
    try:
        await run_member(Member(init, bus, clock, worker=worker, limits=config.init.limits(), first=True))
    finally:
        await host.disconnect()


command = stage_command("init", work)

if __name__ == "__main__":
    command()
