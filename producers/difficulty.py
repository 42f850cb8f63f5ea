"""Which rows of a source are worth another visit: those whose siblings differed when they were tried last.

    chance of a row = floor + (1 - floor) * 4 p (1 - p)      p: mean success of its last decided group

A row that was never decided is always taken, so the first pass is the whole source; one that all siblings solved, or
none, is taken again with the chance `floor`, since a policy gets better and forgets. What a row achieved is read from
`decisions`, up to the offset that came with the credit under which a group is admitted, and the dice follow from seed,
visit and row: the same log gives the same choice. Steps that were undone count: their samples were made all the same.
"""

from __future__ import annotations

import hashlib

import msgpack

from infra.bus import Bus
from infra.clock import Clock
from infra.reading import partition_of, read_between
from infra.wire import unpack
from producers.source import Instance
from schemas.codec import DecodeError
from schemas.decisions import Decision, Fence, GroupDropped, RowSuccess, StepDecided
from schemas.topics import DECISIONS


class Difficulty:
    """What the rows of one run's source achieved, as far as its decisions are read."""

    def __init__(self, bus: Bus, clock: Clock, run: str, seed: int, floor: float) -> None:
        """Set up; nothing is read yet.

        Args:
            bus: the log.
            clock: for the limits of reading.
            run: the run.
            seed: of the run.
            floor: chance of a row that says nothing new.
        """
        self._bus = bus
        self._clock = clock
        self._run = run
        self._seed = seed
        self._floor = floor
        self._partition = partition_of(DECISIONS, run)
        self._next: int | None = None
        """The next decision to read; none before the first reading."""
        self._fence = Fence()
        self._success: dict[int, float] = {}
        """Row -> mean success of its last decided group."""

    async def takes(self, instance: Instance, decided: int) -> bool:
        """Tell whether an instance is worth its samples.

        Args:
            instance: the next one of the source.
            decided: offset of the last decision that may be known.

        Raises:
            WaitTimeout: the decisions up to there could not be read in time.
        """
        await self._read(decided + 1)
        success = self._success.get(instance.row)
        return success is None or _drawn(self._seed, instance.visit, instance.row) < chance(success, self._floor)

    async def _read(self, end: int) -> None:
        if self._next is None:
            self._next = (await self._bus.begin_offsets(DECISIONS.name))[self._partition.partition]
        if end <= self._next:
            return
        async for record in read_between(self._bus, self._clock, {self._partition: self._next}, {self._partition: end}):
            try:
                decision = (await unpack(DECISIONS, record, self._bus)).message
            except DecodeError:
                continue  # whoever decides by it says so; here one row less is known
            if decision.run == self._run:
                self._take(record.offset, decision)
        self._next = end

    def _take(self, offset: int, decision: Decision) -> None:
        if self._fence.passes(offset, decision):
            for found in _rows(decision):
                self._success[found.row] = found.success


def chance(success: float, floor: float) -> float:
    """Return how likely a row is taken again whose last group had this mean success."""
    return floor + (1 - floor) * 4 * success * (1 - success)


def _rows(decision: Decision) -> tuple[RowSuccess, ...]:
    match decision:
        case StepDecided():
            return decision.rows
        case GroupDropped() if decision.row is not None:
            return (decision.row,)
        case _:
            return ()


def _drawn(seed: int, visit: int, row: int) -> float:
    """Return a number in [0, 1) that follows from a seed and a place, evenly spread over places."""
    digest = hashlib.blake2b(msgpack.packb(["difficulty", seed, visit, row]), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
