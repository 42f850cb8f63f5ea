"""Rollout -> Trajectory: the family's grade becomes the sample's outcome.

Grading reads the rollout alone; how much the parts of a grade count was stamped on its task (`shaping.py`). A grader
that raises fails the rollout with a typed failure; a grade that is not a finite number is a grader's failure too, never
a reward; so are process rewards for other turns than there were.
"""

from __future__ import annotations

import asyncio
import math

from infra.errors import Failure, boundary
from infra.stage import Done
from schemas.messages import Rollout, Trajectory
from schemas.outcome import Boundary, Completed, FailureKind, grade_flaw
from schemas.transcript import TranscriptError, check
from stages.eval.shaping import shaped
from stages.handlers.base import Grade
from stages.handlers.registry import handler


async def grade(rollout: Rollout, grader: str | None = None) -> Done[Trajectory]:
    """Grade a rollout.

    Args:
        rollout: what to grade.
        grader: family whose grader is asked; the task's own unless given.

    Raises:
        Failure: the token record cannot be used, the family is unknown, or its grader raises.
    """
    try:
        check(rollout.transcript)  # RUN did, but whoever wrote the record need not have been RUN
    except TranscriptError as error:
        raise Failure(FailureKind.ENGINE, Boundary.TRANSCRIPT, str(error)) from error
    family = handler(grader or rollout.task.family)
    with boundary(Boundary.HANDLER_GRADE, FailureKind.HANDLER):
        given = await asyncio.to_thread(family.grade, rollout, rollout.verdict)
        counted = shaped(given, rollout.transcript, rollout.task.shaping)
        outcome = _completed(counted, turns=len(rollout.transcript.turns), truncated=rollout.stop.truncated)
    return Done(
        Trajectory(
            task=rollout.task,
            outcome=outcome,
            transcript=rollout.transcript,
            verdict=rollout.verdict,
            stop=rollout.stop,
            backend=rollout.backend,
            tokenizer_digest=rollout.tokenizer_digest,
            stage="eval",
        )
    )


def _completed(given: Grade, *, turns: int, truncated: bool) -> Completed:
    # float(): a grader may count with numpy, whose numbers have no form on the wire.
    components = {name: float(value) for name, value in given.components.items()}
    reward, success = math.fsum(components.values()), float(given.success)
    turn_rewards = tuple(float(value) for value in given.turn_rewards)
    done = Completed(
        components=components, reward=reward, success=success, truncated=truncated, turn_rewards=turn_rewards
    )
    wrong = grade_flaw(done, turns)
    if wrong is not None:
        raise Failure(FailureKind.HANDLER, Boundary.HANDLER_GRADE, wrong)
    return done
