"""The log is the arbiter: the first terminal record of a sample wins, at any attempt, without exception.

Every reader that counts outcomes (trainer, replay, `producers/collect.py`, `rollmill/ledger.py`) feeds the records of
one partition, in offset order, through one `Arbiter` per run and gets the same rulings; the view `accepted` in
ClickHouse follows the same rule, and a test holds the two together. Nobody prevents a second record; everybody ignores
it. The digest of a group's first record is the group's; a record with another digest speaks of another task
that took the same id, and is no terminal record at all. Feeding a record again gives the same ruling again.
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

    def rule(self, group: str, sample: int, digest: str, offset: int) -> Ruling:
        """Return what the record at this offset means.

        Args:
            group: group of the sample.
            sample: sibling number.
            digest: payload digest that the record's task carries.
            offset: offset of the record in the run's partition.
        """
        known = self._groups.setdefault(group, _Group(digest))
        if known.digest != digest:
            return Ruling.CONFLICT
        first = known.offsets.setdefault(sample, offset)
        return Ruling.ACCEPTED if first == offset else Ruling.SUPERSEDED

    def accepted(self, group: str) -> dict[int, int]:
        """Return sample -> offset of the accepted records of a group."""
        known = self._groups.get(group)
        return dict(known.offsets) if known else {}
