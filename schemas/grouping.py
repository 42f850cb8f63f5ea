"""Terminal records -> groups of siblings: a pure function of the log's prefix.

Fed with the trajectories of one run in offset order, one at a time. Each goes to the arbiter first; an accepted one
joins its group, and the record that makes a group complete (or brings enough of it, where that was declared) hands the
group out, once. How far ahead a reader has read, and what time it is, never matter. So one number, the position behind
the last record that counts, says which groups were handed out: whoever feeds the same log again from the same start,
with the same rule, gets the same groups at the same positions.

Bodies are kept for open groups only; of a group that is over, its id and digest stay. This file does no I/O; the
trainer, which also filters and obeys recorded decisions, has an assembler of its own (`trainer/groups.py`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from schemas.arbiter import Arbiter, Ruling
from schemas.messages import Trajectory
from schemas.outcome import Completed


@dataclass(frozen=True, kw_only=True)
class SiblingGroup:
    """The accepted outcomes of one task instance."""

    id: str
    """The group."""
    expected: int
    """How many siblings it has."""
    samples: tuple[Trajectory, ...]
    """Accepted outcomes of any kind, by sample number; fewer than `expected` only where that was declared enough."""
    offsets: tuple[int, ...]
    """Where each of them lies in the run's partition."""
    position: int
    """Next offset after the record that handed the group out."""
    low: int
    """Lowest offset of an accepted record of a group that was not handed out by then; `position` if there is none."""

    @property
    def complete(self) -> bool:
        """Tell whether every sibling has ended."""
        return len(self.samples) >= self.expected

    @property
    def graded(self) -> tuple[Trajectory, ...]:
        """The samples that have a reward."""
        return tuple(sample for sample in self.samples if isinstance(sample.outcome, Completed))

    @property
    def failed(self) -> tuple[Trajectory, ...]:
        """The samples that failed, expired or were cancelled: their outcome says why, and they have no reward."""
        return tuple(sample for sample in self.samples if not isinstance(sample.outcome, Completed))


@dataclass
class _Open:
    """A group some of whose siblings have ended."""

    size: int
    first: int
    records: dict[int, tuple[int, Trajectory]] = field(default_factory=dict)
    graded: int = 0


class Grouping:
    """Puts the siblings of one run together."""

    def __init__(self, start: int, *, enough: int | None = None) -> None:
        """Begin at an offset.

        Args:
            start: first offset that will be fed.
            enough: hand a group out with the record that brings its so many-th graded sibling; with 0 no group is
                put together and only the rulings count. None: with the record that ends its last sibling.
        """
        self.position = start
        self.rulings: Counter[Ruling] = Counter()
        self.late = 0
        """Accepted siblings whose group had been handed out without them."""
        self._enough = enough
        self._arbiter = Arbiter()
        self._open: dict[str, _Open] = {}
        """In the order of their first records: the first one holds the lowest offset."""
        self._early: dict[str, int] = {}
        """Group that was handed out before all had ended -> its size."""

    @property
    def open_groups(self) -> int:
        """Groups some of whose siblings have ended."""
        return len(self._open)

    @property
    def low(self) -> int:
        """Lowest offset of an accepted record of a group that was not handed out; else the position."""
        return next(iter(self._open.values())).first if self._open else self.position

    def pass_to(self, position: int) -> None:
        """Take note that nothing of the run lies before this position that was not fed."""
        self.position = max(self.position, position)

    def feed(self, offset: int, trajectory: Trajectory) -> tuple[Ruling, SiblingGroup | None]:
        """Take the record at an offset; return what it means, and the group that it hands out, if it does."""
        if offset < self.position:
            raise ValueError(f"record at offset {offset} after position {self.position}: feed in offset order")
        self.position = offset + 1
        task = trajectory.task
        ruling = self._arbiter.rule(task.group, task.sample, task.payload_digest, offset)
        self.rulings[ruling] += 1
        group = self._accepted(offset, trajectory) if ruling is Ruling.ACCEPTED else None
        return ruling, group

    def _accepted(self, offset: int, trajectory: Trajectory) -> SiblingGroup | None:
        name = trajectory.task.group
        if name in self._early:
            self.late += 1
            if self._arbiter.ended(name) >= self._early[name]:
                self._arbiter.close(name)
                del self._early[name]
            return None
        group = self._open.setdefault(name, _Open(trajectory.task.samples, offset))
        group.records[trajectory.task.sample] = (offset, trajectory)
        group.graded += isinstance(trajectory.outcome, Completed)
        complete = len(group.records) >= group.size
        if not complete and (self._enough is None or group.graded < self._enough):
            return None
        del self._open[name]
        if complete:
            self._arbiter.close(name)
        else:
            self._early[name] = group.size
        return self._handed_out(name, group)

    def _handed_out(self, name: str, group: _Open) -> SiblingGroup:
        ordered = [group.records[sample] for sample in sorted(group.records)]
        return SiblingGroup(
            id=name,
            expected=group.size,
            samples=tuple(trajectory for _, trajectory in ordered),
            offsets=tuple(offset for offset, _ in ordered),
            position=self.position,
            low=self.low,
        )
