"""Records of `events` on their way to a board: each once, and what cannot be read is counted and left out.

A board lives in memory. One that starts is fed the end of the log first (`rebuild`); what comes after, or twice, is
told apart by its offset. A feed does not know where records come from.
"""

from __future__ import annotations

import logging

from infra.blobs import BlobsAway
from infra.board.board import Board
from infra.board.view import BoardView, SampleView
from infra.bus import Bus, Record
from infra.clock import Clock
from infra.reading import positions, read_between
from infra.wire import unpack
from schemas.codec import DecodeError
from schemas.topics import EVENTS

log = logging.getLogger(__name__)

TAIL_RECORDS = 20_000
"""Most records of a partition that a board is rebuilt from: half an hour of one busy worker, seconds of reading."""

NUMBER_DIGITS = 9
"""Longest number of a sample that is looked up."""


class Feed:
    """Feeds one board."""

    def __init__(self, board: Board, bus: Bus, clock: Clock) -> None:
        self.board = board
        self.unreadable = 0
        self._bus = bus
        self._clock = clock
        self._next: dict[int, int] = {}

    def position(self, partition: int) -> int:
        """Return the next offset that is taken; 0 before anything was."""
        return self._next.get(partition, 0)

    def start_at(self, partition: int, offset: int) -> None:
        """Leave out what lies before an offset."""
        self._next[partition] = max(offset, self.position(partition))

    async def take(self, record: Record) -> None:
        """Take one record; one that was taken before changes nothing."""
        if record.offset < self.position(record.partition):
            return
        self._next[record.partition] = record.offset + 1
        try:
            message = (await unpack(EVENTS, record, self._bus)).message
        except (DecodeError, BlobsAway) as error:  # a board waits for nothing, not for a blob store either
            self.unreadable += 1
            log.debug("unreadable events at %s:%d left out: %s", record.tp, record.offset, error)
            return
        now_ms = self._clock.now_ms()
        for event in message.events:
            self.board.take(event, message.worker, now_ms)

    def sample(self, run: str, group: str, number: str) -> SampleView | None:
        """Return what is known of one sample, whose number is text from outside; None if nothing is."""
        if not (number.isdecimal() and len(number) <= NUMBER_DIGITS):
            return None
        return self.board.sample(run, group, int(number), self._clock.now_ms())

    def view(self) -> BoardView:
        """Return the board as it is now."""
        return self.board.view(self._clock.now_ms(), unreadable=self.unreadable)


async def rebuild(feed: Feed, bus: Bus, clock: Clock) -> None:
    """Feed the end of the log: all that lies there now, at most TAIL_RECORDS of each partition."""
    begin = positions(EVENTS, await bus.begin_offsets(EVENTS.name))
    end = positions(EVENTS, await bus.end_offsets(EVENTS.name))
    start = {tp: max(begin[tp], last - TAIL_RECORDS) for tp, last in end.items()}
    for tp, first in start.items():
        feed.start_at(tp.partition, first)
    async for record in read_between(bus, clock, start, end):
        await feed.take(record)
    for tp, last in end.items():
        feed.start_at(tp.partition, last)
