"""The log is the arbiter: the first terminal record of a sample wins, at any attempt, without exception.

Every reader that counts outcomes (trainer, replay, `infra/trajectories.py` and whoever reads through it) feeds the
records of one partition, in offset order, through one `Arbiter` per run and gets the same rulings; the view `accepted`
in ClickHouse follows the same rule, and a test holds the two together. Nobody prevents a second record; everybody
ignores it. The digest of a group's first record is the group's; a record with another digest speaks of another task
that took the same id, and is no terminal record at all. Feeding a record again gives the same ruling again, until its
group is closed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Ruling(StrEnum):
    """What one terminal record means."""

    ACCEPTED = "accepted"
    """The sample's outcome."""
    SUPERSEDED = "superseded"
    """The sample already had an outcome; ignore this one."""
    CONFLICT = "conflict"
    """The record speaks of another task under the same id; ignore it and tell a person."""


@dataclass
class _Group:
    digest: str
    offsets: dict[int, int] = field(default_factory=dict)


class Arbiter:
    """Rules on the records of one run, fed in offset order from one partition."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._closed: dict[str, str] = {}
        """Group -> digest."""

    def rule(self, group: str, sample: int, digest: str, offset: int) -> Ruling:
        """Return what the record at this offset means.

        Args:
            group: group of the sample.
            sample: sibling number.
            digest: payload digest that the record's task carries.
            offset: offset of the record in the run's partition.
        """
        closed = self._closed.get(group)
        if closed is not None:
            return Ruling.SUPERSEDED if closed == digest else Ruling.CONFLICT
        known = self._groups.setdefault(group, _Group(digest))
        if known.digest != digest:
            return Ruling.CONFLICT
        first = known.offsets.setdefault(sample, offset)
        return Ruling.ACCEPTED if first == offset else Ruling.SUPERSEDED

    def accepted(self, group: str) -> dict[int, int]:
        """Return sample -> offset of the accepted records of a group."""
        known = self._groups.get(group)
        return dict(known.offsets) if known else {}

    def ended(self, group: str) -> int:
        """Return how many siblings of a group that is not closed have ended."""
        known = self._groups.get(group)
        return len(known.offsets) if known else 0

    def close(self, group: str) -> None:
        """Forget which records ended a group, once all its siblings have ended: what comes later is superseded.

        For readers that only go forward: a long run then costs them an id and a digest per group.
        """
        known = self._groups.pop(group, None)
        if known is not None:
            self._closed[group] = known.digest
