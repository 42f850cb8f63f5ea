"""What a trainer waited for, and how long: the time in which its optimizer could have worked and did not.

For people only: nothing here decides anything. A wait has one cause, the one that was there when it began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from infra.clock import Clock
from trainer.groups import GroupAssembler


class Cause(StrEnum):
    """What is waited for."""

    GROUPS = "groups"
    """Too few groups are complete: sampling is slower than training."""
    CREDIT = "credit"
    """The same, and the feeder may admit no more: every group that it may has begun to end, and their slowest samples
    hold the step. A larger `max_lag` lets others be sampled meanwhile."""
    LATE = "late"
    """Enough groups are complete, and the step is held for others (`late = wait`)."""
    EVALUATION = "evaluation"
    """The version before is being evaluated, and served to nobody else meanwhile."""
    PUBLICATION = "publication"
    """Weights are written and announced."""
    CHECKPOINT = "checkpoint"
    """A checkpoint is written."""


def cause_of_silence(assembler: GroupAssembler, needed: int, admit_up_to: int | None) -> Cause:
    """Return why no step is decided yet.

    Args:
        assembler: what has come.
        needed: groups of a step.
        admit_up_to: groups that the feeder may have admitted by now; none before it was told.
    """
    if assembler.kept >= needed:
        return Cause.LATE
    spent = admit_up_to is not None and assembler.seen >= admit_up_to
    return Cause.CREDIT if spent else Cause.GROUPS


class IdleTime:
    """Adds waits up, by cause."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: defaultdict[Cause, float] = defaultdict(float)

    @contextmanager
    def waiting(self, cause: Cause) -> Iterator[None]:
        """Count the time inside."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self._seconds[cause] += self._clock.monotonic() - began

    def shares(self, elapsed_s: float) -> dict[str, float]:
        """Return the share of a time that was waited for each cause, the largest first, and begin anew."""
        most_first = sorted(self._seconds.items(), key=lambda item: -item[1])
        found = {cause.value: min(1.0, seconds / elapsed_s) for cause, seconds in most_first if seconds}
        self._seconds.clear()
        return found
