"""Which admitted samples have no terminal record yet, and which of them are to be ended now. Pure.

An end is remembered until the sample would have been given up, since its task may be read later than its outcome;
after that it is forgotten, so memory follows what is on its way and not the length of the run. What ended in that time
is many times what is open, so of an ended sample a digest is kept and nothing else. A sample whose end is known to be
written but not read yet is set aside: it is given up only if that end turns out to be none.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import msgspec

from infra.middleware.deadline import reap_at_ms
from producers.calendar import SECOND_MS, Calendar
from schemas.cancels import Cancels
from schemas.control import Cancel
from schemas.messages import SampleId, Task

Away = Callable[[int], int]
"""Time since a moment, milliseconds since the epoch, during which stages stood still, in milliseconds."""

DIGEST_BYTES = 16
"""Two of a billion samples have the same digest of so many bytes once in 10^20 cases."""


def never(_: int) -> int:
    """Tell that no stage stood still."""
    return 0


class OpenSamples:
    """Admitted samples without a terminal record, ordered by when they are given up."""

    def __init__(self) -> None:
        self._open: dict[SampleId, Task] = {}
        self._published: dict[SampleId, int] = {}
        self._fresh: list[SampleId] = []
        self._given_up: set[SampleId] = set()
        self._aside: set[SampleId] = set()
        self._last: dict[str, int] = {}
        self._ended: dict[bytes, None] = {}
        # No set: of keys that come and go it keeps several times the room.
        self._due: Calendar[SampleId] = Calendar()
        self._forget: Calendar[bytes] = Calendar()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def remembered(self) -> int:
        """Ended samples that are still remembered."""
        return len(self._ended)

    @property
    def oldest_ms(self) -> int | None:
        """When the first of the open samples was published, milliseconds since the epoch; None if none is open."""
        return min(self._published.values(), default=None)

    def admit(self, task: Task, published_ms: int = 0) -> None:
        """Take a task; one that was published again, or has ended, changes nothing."""
        self._note(task)
        if task.id in self._open or _digest(task.id) in self._ended:
            return
        self._open[task.id] = task
        self._published[task.id] = published_ms
        self._fresh.append(task.id)
        self._due.put(task.id, reap_at_ms(task))

    def end(self, task: Task) -> None:
        """Take the task of a terminal record, also of a sample whose own task was not read yet."""
        self._note(task)
        digest = _digest(task.id)
        if digest not in self._ended:
            self._forget.put(digest, reap_at_ms(task))
            self._ended[digest] = None
        if (open_ := self._open.pop(task.id, None)) is not None:
            self._due.discard(task.id, reap_at_ms(open_))
        self._published.pop(task.id, None)
        self._given_up.discard(task.id)
        self._aside.discard(task.id)

    def set_aside(self, sample: SampleId) -> None:
        """Take that a terminal record of a sample is there whose value is still to be read: `end` or `put_back`."""
        if _digest(sample) not in self._ended:
            self._aside.add(sample)

    def put_back(self, sample: SampleId) -> None:
        """Take that such a record is none after all."""
        if sample in self._aside:
            self._aside.remove(sample)
            if sample in self._open:  # it may have been passed over meanwhile
                self._fresh.append(sample)
                self._due.put(sample, reap_at_ms(self._open[sample]))

    def last_reap_at_ms(self, run: str) -> int | None:
        """Return when the last sample of a run is given up, as far as known; None if the run has none."""
        return self._last.get(run)

    def withdrawn(self, cancels: Cancels, *, only_new: bool) -> list[tuple[Task, Cancel]]:
        """Return the open samples that are withdrawn, each once; they stay open until their terminal record is read.

        Args:
            cancels: what is withdrawn.
            only_new: nothing was withdrawn since the last question, so only samples admitted since are looked at.
        """
        looked_at, self._fresh = self._fresh if only_new else list(self._open), []
        found = []
        for sample in looked_at if len(cancels) else ():
            cancel = cancels.of(sample.run, sample.group, sample.sample)
            if cancel is not None and sample in self._open and not self._passed_over(sample):
                self._given_up.add(sample)
                found.append((self._open[sample], cancel))
        return found

    def overdue(self, now_ms: int, away: Away = never) -> list[Task]:
        """Return the samples to give up; they stay open until their terminal record is read."""
        found = []
        for sample in self._due.pop(now_ms):
            if sample not in self._open or self._passed_over(sample):
                continue
            due_ms = reap_at_ms(self._open[sample]) + away(self._published[sample])
            if due_ms <= now_ms:
                self._given_up.add(sample)
                found.append(self._open[sample])
            else:
                self._due.put(sample, due_ms)
        for digest in self._forget.pop(now_ms - SECOND_MS):
            del self._ended[digest]
        return found

    def _passed_over(self, sample: SampleId) -> bool:
        return sample in self._given_up or sample in self._aside

    def _note(self, task: Task) -> None:
        self._last[task.run] = max(reap_at_ms(task), self._last.get(task.run, 0))


def _digest(sample: SampleId) -> bytes:
    return blake2b(msgspec.msgpack.encode(sample), digest_size=DIGEST_BYTES).digest()
