"""One EVAL worker as a process: `python -m stages.eval`."""

from __future__ import annotations

from infra.bus import Bus
from infra.clock import Clock
from infra.config import Config
from infra.stage import Member
from stages.eval.stage import grade
from stages.process import run_member, stage_command
from stages.wiring import eval_stage


async def work(bus: Bus, clock: Clock, config: Config, worker: str) -> None:
    """Run one member of the stage's group until it is stopped."""
    await run_member(Member(eval_stage(grade), bus, clock, worker=worker, limits=config.eval.limits()))


command = stage_command("eval", work)

if __name__ == "__main__":
    command()
