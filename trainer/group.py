"""A group of siblings as the trainer sees it: open while some of them have not ended, then complete.

Every sample that was admitted ends by a record (the reaper sees to it), so a group is complete with its last sibling's
record, however that ended; how many siblings completed is then known for ever. This file does not know rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trainer.terminal import Terminal


@dataclass(frozen=True, kw_only=True)
class Group:
    """A complete group."""

    id: str
    """The group."""
    admission: int | None
    """The feeder's number; none if foreign."""
    first: int
    """Offset of its first accepted record."""
    completed: tuple[Terminal, ...]
    """Graded siblings by sample number: the baseline and the batch."""
    family: str = ""
    """Family of its task."""
    row: int = 0
    """Place of its task in its source."""
    phase: int = 0
    """Phase of the curriculum in which it was admitted."""
    excluded: int
    """Siblings that failed, expired or were cancelled: in neither."""

    @property
    def order(self) -> tuple[int, int, str]:
        """Its place in a batch."""
        return (0, self.admission, self.id) if self.admission is not None else (1, self.first, self.id)

    @property
    def success(self) -> float:
        """Mean success of the graded siblings."""
        return float(np.mean([t.success for t in self.completed])) if self.completed else 0.0


@dataclass
class OpenGroup:
    """A group some of whose siblings have ended."""

    size: int
    records: dict[int, Terminal] = field(default_factory=dict)

    def close(self, group: str) -> Group:
        """Return the complete group."""
        ordered = [self.records[sample] for sample in sorted(self.records)]
        completed = tuple(t for t in ordered if t.completed)
        first = min(ordered, key=lambda t: t.offset)
        return Group(
            id=group,
            admission=first.admission,
            first=first.offset,
            completed=completed,
            family=first.family,
            row=first.row,
            phase=first.phase,
            excluded=len(ordered) - len(completed),
        )
