"""Rollout -> Trajectory: the family's grade becomes the sample's outcome.

Grading reads the rollout alone. A grader that raises fails the rollout with a typed failure; a grade that is not a
finite number is a grader's failure too, never a reward; so are process rewards for other turns than there were.
"""

from __future__ import annotations

import asyncio
import math

from infra.errors import Failure, boundary
from infra.stage import Done
from schemas.messages import Rollout, Trajectory
from schemas.outcome import Boundary, Completed, FailureKind
from stages.handlers.base import Grade
from stages.handlers.registry import handler


async def grade(rollout: Rollout, grader: str | None = None) -> Done[Trajectory]:
    """Grade a rollout.

    Args:
        rollout: what to grade.
        grader: family whose grader is asked; the task's own unless given.

    Raises:
        Failure: the family is unknown, or its grader raises.
    """
    family = handler(grader or rollout.task.family)
    with boundary(Boundary.HANDLER_GRADE, FailureKind.HANDLER):
        given = await asyncio.to_thread(family.grade, rollout, rollout.verdict)
        outcome = _completed(given, turns=len(rollout.transcript.turns), truncated=rollout.stop.truncated)
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
    of_turns = {f"the reward of turn {number}": value for number, value in enumerate(turn_rewards)}
    for name, value in {**components, **of_turns, "the sum": reward, "success": success}.items():
        if not math.isfinite(value):
            raise Failure(FailureKind.HANDLER, Boundary.HANDLER_GRADE, f"{name} is {value}, not a finite number")
    if not 0.0 <= success <= 1.0:
        raise Failure(FailureKind.HANDLER, Boundary.HANDLER_GRADE, f"success is {success}, outside [0, 1]")
    if turn_rewards and len(turn_rewards) != turns:
        raise Failure(
            FailureKind.HANDLER,
            Boundary.HANDLER_GRADE,
            f"{len(turn_rewards)} process rewards for {turns} turns: give one for each turn, or none",
        )
    return Completed(
        components=components, reward=reward, success=success, truncated=truncated, turn_rewards=turn_rewards
    )
