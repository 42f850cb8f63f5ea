"""EVAL with a handler that says when it starts and can be held up: `python -m tests.integration.zombie`.

In the folder that each verdict names, `started-<worker>-<sample>` appears when a rollout is worked on; the work lasts
as long as `hold-<pid>` is there. The trajectory's `backend` is the worker.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from infra.stage import Done, Member
from schemas.messages import Rollout, Trajectory
from schemas.outcome import Completed
from stages.process import Surroundings, stage_command
from stages.wiring import eval_stage

LOOK_EVERY_S = 0.02
"""Pause between two looks for the file that holds the work up, seconds."""


async def grade(rollout: Rollout) -> Done[Trajectory]:
    """Grade, once nothing holds it up."""
    folder = Path(rollout.verdict["folder"])
    (folder / f"started-{os.getpid()}-{rollout.task.sample}").touch()
    while (folder / f"hold-{os.getpid()}").exists():
        await asyncio.sleep(LOOK_EVERY_S)
    outcome = Completed(components={}, reward=1.0, success=1.0, truncated=False)
    trajectory = Trajectory(
        task=rollout.task,
        outcome=outcome,
        transcript=rollout.transcript,
        verdict=rollout.verdict,
        stop=rollout.stop,
        backend=str(os.getpid()),
        stage="eval",
    )
    return Done(trajectory)


@asynccontextmanager
async def member(around: Surroundings) -> AsyncIterator[Member]:
    """Give one member."""
    yield around.member(eval_stage(grade), around.config.eval)


command = stage_command("eval", member)

if __name__ == "__main__":
    command()
