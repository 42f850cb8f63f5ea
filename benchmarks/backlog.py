"""How busy a stage's slots are while work waits for them: pure arithmetic on times.

The window opens when the first full load is waiting (as many jobs as there are slots) and closes when the last job
that waited is taken: before and after, empty slots are not the stage's fault. A slot counts as busy for as long as the
job in it was meant to take, not longer: a job that oversleeps, and everything the stage does around a job (fetching,
decoding, publishing, waiting for the acknowledgement), is time lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """From here to there, in seconds on one clock."""

    start: float
    stop: float

    @property
    def length(self) -> float:
        """How long it is."""
        return self.stop - self.start


def backlog_window(arrived: Sequence[float], taken: Sequence[float], *, slots: int) -> Span:
    """Return the span in which jobs waited.

    Args:
        arrived: when each job came into the queue.
        taken: when each job was taken out of it, in any order.
        slots: how many jobs are worked on at once.

    Raises:
        ValueError: a full load never waited, so there is nothing to measure.
    """
    waiting = 0
    # At the same instant an arrival comes first: what was taken must have been there.
    changes = heapq.merge(((at, 1) for at in sorted(arrived)), ((at, -1) for at in sorted(taken)), key=_order)
    for at, change in changes:
        waiting += change
        if waiting >= slots:
            return Span(at, max(taken))
    raise ValueError(f"{len(arrived)} jobs never left {slots} waiting: give the stage more work")


def busy_slots(jobs: Sequence[Span], window: Span) -> float:
    """Return the mean number of slots that were busy in a window."""
    overlaps = (min(job.stop, window.stop) - max(job.start, window.start) for job in jobs)
    return sum(overlap for overlap in overlaps if overlap > 0) / window.length


def _order(change: tuple[float, int]) -> tuple[float, int]:
    at, step = change
    return at, -step
