"""One EVAL worker as a process: `python -m stages.eval`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.stage import Member
from stages.eval.stage import grade
from stages.process import Surroundings, stage_command
from stages.wiring import eval_stage


@asynccontextmanager
async def member(around: Surroundings) -> AsyncIterator[Member]:
    """Give a member of the stage's group."""
    yield around.member(eval_stage(grade), around.config.eval)


command = stage_command("eval", member)

if __name__ == "__main__":
    command()
