"""When a run has ended, and why: decided between two records, from what the assembler knows and the limits of the run.

What is trained on never depends on it: an end is a record, and a run that ended can be resumed with other limits. A
time limit may end a run, never decide a step. Nothing ends before everything that was decided earlier is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infra.errors import RollmillError
from trainer.config import OnNoVariance, StopConfig
from trainer.groups import GroupAssembler
from trainer.guards import recent_success


class NothingToLearn(RollmillError):
    """Too many groups in a row were dropped without a step, and the run is told to raise then."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a run."""

    reason: str
    """Why."""
    error: NothingToLearn | None = None
    """What the trainer ends with, where a person should look; the run then keeps its feeder."""


def ending(
    limits: StopConfig, assembler: GroupAssembler, *, ran_s: float, stopped: bool, why_no_step: Callable[[], str]
) -> Ending | None:
    """Return the end of a run; none while it goes on.

    Args:
        limits: of the run.
        assembler: what is decided.
        ran_s: seconds since this trainer began.
        stopped: somebody asked for the end.
        why_no_step: says what became of the groups since the last step.
    """
    if not assembler.caught_up:
        return None
    if assembler.steps >= limits.max_steps:
        return Ending(reason=f"{limits.max_steps} steps made")
    success, may_end = recent_success(assembler.recent, limits.success_groups), assembler.steps >= limits.min_steps
    if limits.success is not None and may_end and success is not None and success >= limits.success:
        return Ending(reason=f"success {success:.3f} over {limits.success_groups} groups")
    if assembler.dropped >= limits.max_dropped and (end := _nothing_varies(limits, assembler, why_no_step)):
        return end
    if limits.time_limit_s is not None and may_end and ran_s >= limits.time_limit_s:
        return Ending(reason=f"time limit of {limits.time_limit_s:.0f} s")
    return Ending(reason="stopped") if stopped else None


def _nothing_varies(limits: StopConfig, assembler: GroupAssembler, why_no_step: Callable[[], str]) -> Ending | None:
    match limits.on_no_variance:
        case OnNoVariance.FEWER if assembler.kept:
            return None  # the step is made of these, or waits for a late group
        case OnNoVariance.RAISE:
            error = NothingToLearn(
                f"{why_no_step()}. {assembler.steps} steps are made, and --resume goes on with a larger "
                f"`stop.max_dropped` or with `stop.on_no_variance = fewer`; easier or harder tasks, another horizon or "
                f"filter are what helps"
            )
            return Ending(reason=why_no_step(), error=error)
        case _:
            return Ending(reason=why_no_step())
