"""Which samples are withdrawn: a set of `Cancel` records, asked in constant time. Pure.

A target is a run, `run/group` or `run/group/sample`. Targets are compared as text and never taken apart, so a foreign
producer's group may hold a `/`. What is withdrawn stays so until its record is removed: it is a state, and also covers
samples that are admitted later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from schemas.control import Cancel


def targets(run: str, group: str, sample: int) -> tuple[str, str, str]:
    """Return the targets that cover a sample, the narrowest first."""
    return f"{run}/{group}/{sample}", f"{run}/{group}", run


class Cancels:
    """The withdrawals that are in force."""

    def __init__(self, records: Iterable[Cancel] = ()) -> None:
        self._by_target: dict[str, Cancel] = {record.target: record for record in records}

    def __len__(self) -> int:
        return len(self._by_target)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_target)

    def put(self, target: str, record: Cancel | None) -> None:
        """Take the latest record of a target; None when it was removed."""
        if record is None:
            self._by_target.pop(target, None)
        else:
            self._by_target[target] = record

    def get(self, target: str) -> Cancel | None:
        """Return the withdrawal of exactly this target."""
        return self._by_target.get(target)

    def of(self, run: str, group: str, sample: int) -> Cancel | None:
        """Return the withdrawal that covers a sample; the narrowest one, since it says most about the sample."""
        if not self._by_target:
            return None
        found = (self._by_target.get(target) for target in targets(run, group, sample))
        return next((record for record in found if record is not None), None)
