"""Progress on one partition when work completes out of order. Pure: no clock, no bus.

    not handed out -> in flight -> done          every offset is one of these, until the committed offset passes it

The offset to commit is the lowest one that is not done; the map beside it (`offset_map.py`) names the done ones above
it, so a restart repeats only what was in flight. The map also counts how often each unfinished offset was started: one
that was started twice and never ended may have killed its workers, and is a suspect (`infra/isolation.py` runs it).
Work that is handed back alive is no suspect: `committable(handed_back=True)` forgets those starts.

Gaps in the log (offsets that are never handed out) count as done. It does not know why work ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.bus import Committed
from infra.offset_map import MAX_STARTS, OffsetMap, decode, encode

MAX_WINDOW = 50_000
"""Offsets between the committed one and the last one handed out; beyond it a partition waits for its slowest record."""

SUSPECT_STARTS = 2
"""A record with so many starts that never ended is not run in the worker's own process."""


@dataclass(frozen=True, slots=True)
class Start:
    """One offset as it goes into work."""

    starts: int
    """How often it was started before without an end."""

    @property
    def suspect(self) -> bool:
        """Tell whether it may have killed the workers that started it."""
        return self.starts >= SUSPECT_STARTS

    @property
    def proven(self) -> bool:
        """Tell whether it has already killed a process that ran nothing else."""
        return self.starts > SUSPECT_STARTS


NEVER = Start(0)
"""It was not started before."""


class Progress:
    """What was handed out of one partition, and what of it is done.

    Attributes:
        fresh: nothing was started yet; whoever starts the first records sets it to False.
    """

    def __init__(self, committed: Committed) -> None:
        """Go on from the group's progress.

        Args:
            committed: the offset to go on from, with its map if it has one.
        """
        self.fresh = True
        known = decode(committed) or OffsetMap(committed.offset, {})
        self._floor = committed.offset
        self._restored = known.upper
        self._unfinished = dict(known.unfinished)
        """Offset -> starts, of those that an earlier owner began; each is handed out again, or was a gap."""
        self._in_flight: dict[int, Start] = {}
        self._done: set[int] = set()
        self._next = known.upper

    @property
    def in_flight(self) -> int:
        """Number of offsets being worked on."""
        return len(self._in_flight)

    @property
    def next_offset(self) -> int:
        """Where to go on after a rebalance: what is below it is done, or in flight here."""
        return min(self._unfinished, default=self._next)

    @property
    def full(self) -> bool:
        """Tell whether nothing more may be started before the lowest offset ends."""
        return self._next - self._lowest() >= MAX_WINDOW

    @property
    def completed_ahead(self) -> int:
        """Number of offsets above the committed one that are done: lag that is no work."""
        lowest = self._lowest()
        return self._next - lowest - len(self._in_flight) - len(self._unfinished)

    def start(self, offset: int) -> Start | None:
        """Take an offset into work; None if it is in flight or done already (a redelivery)."""
        if offset in self._in_flight or offset in self._done or offset < self._floor:
            return None
        for gap in [before for before in self._unfinished if before < offset]:
            del self._unfinished[gap]
        if offset < self._restored and offset not in self._unfinished:
            return None
        start = self._in_flight[offset] = Start(self._unfinished.pop(offset, 0))
        self._next = max(self._next, offset + 1)
        return start

    def pass_to(self, offset: int) -> None:
        """Take note that everything below an offset was handed out: what of it never came is a gap."""
        if self._unfinished:
            self._unfinished = {before: starts for before, starts in self._unfinished.items() if before >= offset}
        self._next = max(self._next, offset)

    def finish(self, offset: int) -> None:
        """Mark an offset as done: its output is in the log, or it needs none.

        Work that was given up is never marked: it stays in flight here, so that no commit passes it.
        """
        del self._in_flight[offset]
        self._done.add(offset)

    def died(self, offset: int) -> Start:
        """Count that a suspect killed the process that ran it alone; it stays in flight. Return it as it is now."""
        start = self._in_flight[offset] = Start(min(self._in_flight[offset].starts + 1, MAX_STARTS))
        return start

    def committable(self, *, handed_back: bool = False) -> Committed:
        """Return the progress to commit.

        Args:
            handed_back: what is in flight is given to another member by one that is alive, so its starts do not count.
        """
        self._floor = self._lowest()
        self._done = {done for done in self._done if done >= self._floor}
        counted = {offset: _counted(start, handed_back=handed_back) for offset, start in self._in_flight.items()}
        return encode(self._floor, OffsetMap(self._next, self._unfinished | counted))

    def _lowest(self) -> int:
        return min([*self._in_flight, *self._unfinished, self._next])


def _counted(start: Start, *, handed_back: bool) -> int:
    if start.suspect:
        return start.starts  # it runs in a process of its own, whose death is counted by `died`
    return 0 if handed_back else start.starts + 1
