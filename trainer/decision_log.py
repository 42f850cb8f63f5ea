"""The trainer's side of `decisions`: take the run over, write, read back, notice a successor.

Fencing is by log order, without transactions: the offset of a TrainerStarted is its trainer's epoch, and whatever an
older trainer writes behind it is ignored by every reader. So a decision counts once it is read back with no newer
TrainerStarted before it; until then nothing is done about it. A trainer that meets a newer one gives up (`Fenced`).
"""

from __future__ import annotations

import logging

from infra.bus import Bus, Reader, Record, TopicPartition
from infra.clock import Clock
from infra.errors import ConfigError, RollmillError, WaitTimeout
from infra.reading import partition_of, read_between
from infra.wire import Publisher, unpack
from schemas.codec import DecodeError
from schemas.decisions import Decision, TrainerStarted
from schemas.topics import DECISIONS
from trainer.history import History

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""Longest wait until a decision that was acknowledged is read back, in seconds."""

POLL_S = 0.5
"""One poll of the log lasts at most this long, in seconds."""

MAX_RECORDS = 500
"""Most records of one poll."""


class Fenced(RollmillError):
    """Another trainer has taken the run over."""


def decisions_of(run: str) -> TopicPartition:
    """Return where a run's decisions lie."""
    return partition_of(DECISIONS, run)


async def read_history(bus: Bus, clock: Clock, run: str) -> History:
    """Return what a run has decided up to now; that of a run nobody has started is empty."""
    return History.of(await read_decisions(bus, clock, run))


async def read_started(bus: Bus, clock: Clock, run: str) -> tuple[History, int]:
    """Return what a run has decided, and the first offset of `trajectories` that belongs to it.

    Raises:
        ConfigError: no trainer ever started on the run.
    """
    history = await read_history(bus, clock, run)
    if history.start is None:
        raise ConfigError(
            f"run {run!r} has no trainer in `decisions`: no trainer ever started on it, or the topic prefix is "
            f"another one. `rollmill runs` lists the runs"
        )
    return history, history.start


async def read_decisions(bus: Bus, clock: Clock, run: str, end: int | None = None) -> list[tuple[int, Decision]]:
    """Return all decisions of a run, live or not, up to an offset or to the end of the log.

    Raises:
        WaitTimeout: the log's end was not reached in time.
    """
    partition = decisions_of(run)
    begin = (await bus.begin_offsets(DECISIONS.name)).get(partition.partition, 0)
    if end is None:
        end = (await bus.end_offsets(DECISIONS.name)).get(partition.partition, 0)
    found: list[tuple[int, Decision]] = []
    async for record in read_between(bus, clock, {partition: begin}, {partition: end}):
        decision = await _decision(bus, record, run)
        if decision is not None:
            found.append((record.offset, decision))
    return found


class DecisionLog:
    """Reads and writes one run's decisions as one trainer."""

    def __init__(self, bus: Bus, clock: Clock, publisher: Publisher, run: str) -> None:
        self._bus = bus
        self._clock = clock
        self._publisher = publisher
        self._run = run
        self._partition = decisions_of(run)
        self._reader: Reader | None = None
        self.epoch = -1
        self.last_offset = -1

    async def take_over(self, started: TrainerStarted) -> list[tuple[int, Decision]]:
        """Become the run's trainer and return every decision up to that record, it included."""
        position = await self._publisher.publish(DECISIONS, started)
        self.epoch = self.last_offset = position.offset
        self._reader = await self._bus.read({self._partition: self.epoch + 1})
        return await read_decisions(self._bus, self._clock, self._run, self.epoch + 1)

    async def write(self, decision: Decision) -> int:
        """Write a decision, return its offset once it is known to count.

        Raises:
            Fenced: another trainer took over before it.
            WaitTimeout: it was acknowledged and could not be read back in time.
        """
        position = await self._publisher.publish(DECISIONS, decision)
        reader = self._open_reader()
        deadline = self._clock.monotonic() + WAIT_S
        while reader.position(self._partition) <= position.offset:
            await self._read(reader, POLL_S)
            if self._clock.monotonic() > deadline:
                place = f"offset {position.offset} of {self._partition}"
                raise WaitTimeout(f"waited {WAIT_S:.0f} s to read back the decision at {place}; is the broker healthy?")
        self.last_offset = position.offset
        return position.offset

    async def check(self) -> None:
        """Raise Fenced if another trainer is seen to have taken over."""
        await self._read(self._open_reader(), 0)

    async def close(self) -> None:
        """Stop reading."""
        if self._reader is not None:
            await self._reader.close()

    async def _read(self, reader: Reader, timeout_s: float) -> None:
        for record in await reader.poll(MAX_RECORDS, timeout_s):
            decision = await _decision(self._bus, record, self._run)
            if isinstance(decision, TrainerStarted):
                raise Fenced(
                    f"another trainer took run {self._run!r} over at offset {record.offset} of `decisions` (this one "
                    f"began at {self.epoch}): what this one decides no longer counts, so it ends here"
                )

    def _open_reader(self) -> Reader:
        if self._reader is None:
            raise RuntimeError("take_over comes first")
        return self._reader


async def _decision(bus: Bus, record: Record, run: str) -> Decision | None:
    try:
        message = (await unpack(DECISIONS, record, bus)).message
    except DecodeError as error:
        log.warning("`decisions` offset %d is not a decision: %s", record.offset, error)
        return None
    return message if message.run == run else None
