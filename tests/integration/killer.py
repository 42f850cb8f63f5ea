"""INIT with a handler that kills its process on some tasks: `python -m tests.integration.killer`."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.stage import Done, Member
from schemas.messages import Episode, Task
from stages.process import Surroundings, stage_command
from stages.wiring import init_stage


async def kill_or_open(task: Task) -> Done[Episode]:
    """Open an episode, or die as native code does."""
    if task.payload["kills"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return Done(Episode(task=task, host="none", lease=f"lease-{task.sample}", messages=()))


@asynccontextmanager
async def member(around: Surroundings) -> AsyncIterator[Member]:
    """Give one member."""
    yield around.member(init_stage(kill_or_open), around.config.init, first=True)


command = stage_command("init", member)

if __name__ == "__main__":
    command()
