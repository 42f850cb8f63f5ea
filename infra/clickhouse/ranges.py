"""Which offsets go into one insert: the buffer of one partition, pure.

A range [first, last] starts where the group's commit stands and ends where its owner chose. The choice is written
into the commit's metadata before the insert (the intent), so that whoever owns the partition after a crash inserts
exactly the same range under the same token, and ClickHouse keeps one copy. That is why a range may be closed by time
and still be deterministic. A range once chosen stays chosen until it is stored, also when a commit failed: nobody
knows whether the broker took it.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from infra.bus import Committed, TopicPartition
from infra.clickhouse.rows import Row, Rows

_INTENT = re.compile(r"rm1:(\d{1,20})")


@dataclass(frozen=True)
class Range:
    """Offsets first..last of one partition, and their rows."""

    tp: TopicPartition
    first: int
    last: int
    rows: Rows

    def token(self, group: str, table: str) -> str:
        """Return the deduplication token of this range's rows in one table."""
        return f"{group}:{table}:{self.tp.topic}:{self.tp.partition}:{self.first}-{self.last}"

    @property
    def intent(self) -> Committed:
        """What is committed before the insert."""
        return Committed(self.first, f"rm1:{self.last}")

    @property
    def done(self) -> Committed:
        """What is committed after the insert."""
        return Committed(self.last + 1)


def intended(committed: Committed) -> int | None:
    """Return the last offset of the range that was about to be inserted, or None if none was."""
    found = _INTENT.fullmatch(committed.metadata)
    return int(found.group(1)) if found else None


class Want(Enum):
    """What to do with a record."""

    TAKE = auto()
    """It is the next one."""
    SKIP = auto()
    """It was taken already, or comes again."""
    REWIND = auto()
    """Records before it may be missing: go back to `next_offset`."""


@dataclass(frozen=True)
class _Entry:
    offset: int
    rows: Rows
    size: int
    count: int


class PartitionBuffer:
    """The rows of one owned partition that are not stored yet, in offset order."""

    def __init__(self, tp: TopicPartition, committed: Committed, *, wait_s: float) -> None:
        self.tp = tp
        self._first = committed.offset
        self._next = committed.offset
        self._ahead: int | None = None
        self._intended = intended(committed)
        self._wait_s = wait_s
        self._entries: deque[_Entry] = deque()
        self._oldest_at = 0.0
        self.bytes = 0
        self.rows = 0

    @property
    def stored_to(self) -> int:
        """Rows of all offsets below this are stored."""
        return self._first

    @property
    def next_offset(self) -> int:
        """The offset of the record that should come next."""
        return self._next

    def wants(self, offset: int) -> Want:
        """Say what to do with a record that was handed out.

        A rebalance hands records out again, and a record polled before it may arrive in a buffer begun after it, ahead
        of those that come again. Taking it would pass them over, so anything ahead is asked for once more; a log does
        have gaps, and what is ahead a second time follows one.
        """
        if offset < self._next:
            return Want.SKIP
        if offset in {self._next, self._ahead}:
            return Want.TAKE
        if self._ahead is not None and offset > self._ahead:
            return Want.SKIP
        self._ahead = offset
        return Want.REWIND

    def add(self, offset: int, rows: Rows, size: int, now: float) -> None:
        """Take the rows of the next record; a record without any still counts as passed."""
        if not self._entries:
            self._oldest_at = now
        count = sum(map(len, rows.values()))
        self._entries.append(_Entry(offset, rows, size, count))
        self._next = offset + 1
        self._ahead = None
        self.bytes += size
        self.rows += count

    def due(self, now: float, *, max_rows: int, max_bytes: int, draining: bool = False) -> Range | None:
        """Return the range to insert now, or None to wait."""
        if not self._entries:
            return None
        if self._intended is not None:
            # Nothing else may go before the intended range is complete. Offsets may be missing from the log, so it
            # is complete once anything at or beyond its end was seen.
            return self._range(self._intended) if self._next > self._intended else None
        waited = now - self._oldest_at >= self._wait_s
        if draining or waited or self.rows >= max_rows or self.bytes >= max_bytes:
            self._intended = self._entries[-1].offset
            return self._range(self._intended)
        return None

    def stored(self, done: Range, now: float) -> None:
        """Forget the rows of a range that is stored and committed."""
        while self._entries and self._entries[0].offset <= done.last:
            entry = self._entries.popleft()
            self.bytes -= entry.size
            self.rows -= entry.count
        self._first = done.last + 1
        self._intended = None
        self._oldest_at = now

    def _range(self, last: int) -> Range:
        joined: dict[str, list[Row]] = {}
        for entry in self._entries:
            if entry.offset > last:
                break
            for table, rows in entry.rows.items():
                joined.setdefault(table, []).extend(rows)
        return Range(self.tp, self._first, last, joined)
