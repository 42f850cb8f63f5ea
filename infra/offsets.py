"""Progress on one partition when work completes out of order. Pure: no clock, no bus.

Every offset that was handed out is in flight or done, until the committed offset passes it. The offset to commit is
the lowest one in flight, or the next one to be handed out when nothing is; so a restart repeats only work that had
not ended, and nothing that had not ended is ever skipped. Gaps in the log (offsets never handed out) count as done.
"""

from __future__ import annotations

from infra.bus import Committed


class Progress:
    """What was handed out of one partition, and what of it is done."""

    def __init__(self) -> None:
        self._in_flight: set[int] = set()
        self._done: set[int] = set()
        self._next: int | None = None
        self._floor = 0

    @property
    def in_flight(self) -> int:
        """Number of offsets being worked on."""
        return len(self._in_flight)

    def start(self, offset: int) -> bool:
        """Take an offset into work; False if it is in flight or done already (a redelivery)."""
        if offset in self._in_flight or offset in self._done or offset < self._floor:
            return False
        self._in_flight.add(offset)
        self._next = max(self._next or 0, offset + 1)
        return True

    def finish(self, offset: int) -> None:
        """Mark an offset as done: its output is in the log, or it needs none.

        Work that was given up is never marked: it stays in flight here, so that no commit passes it.
        """
        self._in_flight.remove(offset)
        self._done.add(offset)

    def committable(self) -> Committed | None:
        """Return the progress to commit, or None when nothing was handed out yet.

        The metadata is the place of the map of offsets done above the committed one; it is empty in this form.
        """
        if self._next is None:
            return None
        self._floor = min(self._in_flight, default=self._next)
        self._done = {done for done in self._done if done >= self._floor}
        return Committed(self._floor)
