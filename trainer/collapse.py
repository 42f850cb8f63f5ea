"""When a run has collapsed, and what follows: it goes back to its best version once, with half the learning rate. Pure.

Judged where a version has just been evaluated, from what is written down and from the entropy of the step that trained
on, which is that of the version. A single bad evaluation proves nothing; a format that is gone, or an entropy that the
soft floor could not hold, does.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas.scores import Scores
from trainer.evaluation import best
from trainer.gate import ALLOWED

LR_SCALE = 0.5
"""Factor on the learning rate after a collapse."""

IN_A_ROW = 2
"""Evaluations that must be below the best one."""

ENTROPY_ALARM = 0.5
"""Share of `algorithm.entropy_floor` below which entropy has collapsed: the floor is soft and pulls from there on."""


class GoBack(Exception):
    """The run goes on from an earlier step: no error, but the way out of a trainer that is followed by another one."""

    def __init__(self, step: int, cause: str) -> None:
        """Name the step, and why."""
        super().__init__(f"back to step {step}: {cause}")
        self.step = step
        self.cause = cause


def collapse(evaluations: Mapping[int, Scores], *, entropy: float, floor: float | None) -> str:
    """Return why a run has collapsed, for a person; empty if it has not.

    Args:
        evaluations: step -> what its version achieved, up to the last one.
        entropy: of the last evaluated version, nats per sampled token.
        floor: `algorithm.entropy_floor`.
    """
    if floor is not None and entropy < ENTROPY_ALARM * floor:
        return f"entropy of {entropy:.3f} nats, below {ENTROPY_ALARM:g} of its floor {floor:g}"
    top = best(evaluations)
    if top is None:
        return ""
    complete = [evaluations[step] for step in sorted(evaluations) if not evaluations[step].incomplete]
    last, peak = complete[-IN_A_ROW:], evaluations[top]
    if last[-1].valid_high < ALLOWED <= peak.valid_low:
        return (
            f"at most {last[-1].valid_high:.1%} of the turns are allowed actions, {peak.valid:.1%} were at step {top}"
        )
    if len(last) == IN_A_ROW and all(found.success < peak.low for found in last):
        found = " and ".join(f"{one.success:.3f}" for one in last)
        return f"success of {found}, below {peak.success:.3f} of step {top} by more than its interval ({peak.low:.3f})"
    return ""
