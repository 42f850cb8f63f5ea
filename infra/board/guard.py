"""Ends a board that stands still or has grown: it holds nothing that its next life would not read again.

Faust's consumers are known to stop without an error after days, and to grow; so what counts as alive is progress. The
log being away is no standstill: then nothing is known, and nothing is judged.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from infra.board.feed import Feed
from infra.bus import Bus
from infra.clock import Clock
from infra.errors import BusError, ServiceError
from schemas.topics import EVENTS

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
"""The ends of the topic are compared with what was read this often, seconds."""

STALL_S = 60.0
"""Records that lie in the log this long while none of their partition is read mean a standstill, seconds."""

_STATM = Path("/proc/self/statm")


class BoardStuck(ServiceError):
    """A board must be started anew."""


class Guard:
    """Watches one board from beside."""

    def __init__(self, feed: Feed, bus: Bus, clock: Clock, *, memory_mb: int) -> None:
        self._feed = feed
        self._bus = bus
        self._clock = clock
        self._memory_mb = memory_mb
        self._waiting: dict[int, tuple[int, float]] = {}
        self.behind = 0
        """Records that lay unread in the log at the last look."""

    async def watch(self) -> None:
        """Look until cancelled. Raises BoardStuck."""
        while True:
            await self._clock.sleep(LOOK_EVERY_S)
            self.look_at_memory(resident_mb())
            try:
                self.look_at_log(await self._bus.end_offsets(EVENTS.name))
            except BusError as error:
                log.warning("the log does not say where it ends, asked again: %s", error)
                self._waiting.clear()

    def look_at_log(self, ends: dict[int, int]) -> None:
        """Compare the ends of the partitions with what was read. Raises BoardStuck."""
        now = self._clock.monotonic()
        positions = {partition: self._feed.position(partition) for partition in ends}
        self.behind = sum(max(0, end - positions[partition]) for partition, end in ends.items())
        for partition, end in ends.items():
            position = positions[partition]
            stood_at, since = self._waiting.get(partition, (-1, now))
            if position >= end:
                self._waiting.pop(partition, None)
            elif stood_at != position:
                self._waiting[partition] = (position, now)
            elif now - since > STALL_S:
                raise BoardStuck(
                    f"the board has read nothing of `events`, partition {partition}, for {now - since:.0f} s; it "
                    f"stands at offset {position} of {end}. It ends so that whoever supervises it starts it again."
                )

    def look_at_memory(self, resident: float | None) -> None:
        """Judge how much memory the process holds. Raises BoardStuck."""
        if resident is not None and resident > self._memory_mb:
            raise BoardStuck(
                f"the board holds {resident:.0f} MB of memory, more than board.memory_mb = {self._memory_mb}. "
                "It ends so that whoever supervises it starts it again."
            )


def resident_mb() -> float | None:
    """Return this process's resident memory in megabytes; None where the system does not say."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
