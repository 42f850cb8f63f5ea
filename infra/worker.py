"""The one loop that every stage runs on: fetch, decode, handle, publish, settle, commit, drain.

Promises:

- many jobs run at once per partition and end in any order; a record is committed only when its output is
  acknowledged and every record before it is done (`offsets.py`);
- a record whose partition is lost is cancelled and never committed from here; what it already published is
  arbitrated like any record;
- a record handed out again after a rebalance while it is in work is not worked on twice;
- a record that cannot be read, or not be passed on, goes to `dead` and the stream goes on;
- when the log itself is away for longer than its limit the worker ends with a BusError: whoever supervises it starts
  it again, and nothing is lost, since nothing was committed.

The loop knows no stage: it is given a call (handler plus middleware) and the topics to read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infra.bus import Bus, Consumer, Record, TopicPartition
from infra.clock import Clock, wait_for
from infra.errors import BusError, NotOwner, TooLarge
from infra.middleware import Call, Job, Result
from infra.middleware.dead_letter import bury
from infra.offsets import Progress
from infra.wire import Publisher, trace_of, unpack
from schemas.codec import DecodeError
from schemas.topics import Topic

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one worker."""

    max_in_flight: int = 64
    """Records worked on at once."""
    poll_s: float = 0.2
    """Longest wait of one poll, seconds."""
    commit_every_s: float = 0.25
    """Progress is committed this often, seconds."""
    drain_s: float = 10.0
    """Jobs may finish this long after a stop is asked for, seconds; the rest is handed back."""


class Worker:
    """Works on the records of some topics as one member of a consumer group."""

    def __init__(
        self,
        *,
        bus: Bus,
        clock: Clock,
        stage: str,
        sources: Sequence[Topic[Any]],
        call: Call,
        publisher: Publisher,
        limits: Limits,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._stage = stage
        self._sources = {topic.name: topic for topic in sources}
        self._call = call
        self._publisher = publisher
        self._limits = limits
        self._progress: dict[TopicPartition, Progress] = {}
        self._jobs: dict[asyncio.Task[None], tuple[Record, Progress]] = {}
        self._sleeping: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self._slot_free = asyncio.Event()
        self._broken: BaseException | None = None

    @property
    def in_flight(self) -> int:
        """Records being worked on."""
        return len(self._jobs)

    def stop(self) -> None:
        """Ask the loop to take nothing new, finish what it can and leave."""
        self._stopping.set()
        self._slot_free.set()

    async def run(self) -> None:
        """Work until stopped or cancelled. Raises BusError when the log is away for too long."""
        consumer = await self._bus.join(
            list(self._sources), self._stage, on_assigned=self._assigned, on_revoked=self._revoked
        )
        committing = asyncio.create_task(self._commit_regularly(consumer))
        try:
            await self._take_work(consumer)
            await self._drain()
        finally:
            committing.cancel()
            await asyncio.gather(committing, return_exceptions=True)
            await self._hand_back()
            await self._commit(consumer)
            await consumer.close()
        if self._broken is not None:
            raise self._broken

    async def _take_work(self, consumer: Consumer) -> None:
        while not self._stopping.is_set():
            free = self._limits.max_in_flight - len(self._jobs)
            if free <= 0:
                await self._wait_for_slot()
                await consumer.poll(0, 0.0)
                continue
            for record in await consumer.poll(free, self._limits.poll_s):
                self._dispatch(record)

    async def _wait_for_slot(self) -> None:
        self._slot_free.clear()
        await wait_for(self._slot_free, self._clock, self._limits.poll_s)

    def _dispatch(self, record: Record) -> None:
        progress = self._progress.setdefault(record.tp, Progress())
        if not progress.start(record.offset):
            return  # handed out again by a rebalance while in work or done
        job = asyncio.create_task(self._work(record), name=f"{self._stage}:{record.tp}:{record.offset}")
        self._jobs[job] = (record, progress)
        job.add_done_callback(self._ended)

    async def _work(self, record: Record) -> None:
        topic = self._sources[record.topic]
        if topic.delay_ms:
            await self._until(record.timestamp_ms + topic.delay_ms)
        try:
            received = await unpack(topic, record)
        except DecodeError as error:
            log.warning("%s: unreadable record %s:%d to dead: %s", self._stage, record.tp, record.offset, error)
            await bury(self._bus, self._clock, record, stage=self._stage, cause=str(error))
            return
        result = await self._call(Job(self._stage, received))
        try:
            await self._publish(record, result)
        except TooLarge as error:
            # A task at the log's own limit cannot be sent on; the reaper ends its sample.
            log.warning("%s: %s:%d to dead, it cannot be passed on: %s", self._stage, record.tp, record.offset, error)
            await bury(self._bus, self._clock, record, stage=self._stage, cause=str(error))

    async def _until(self, due_ms: int) -> None:
        """Sleep until a record of a retry tier is due; a stop does not wait for that."""
        job = asyncio.current_task()
        assert job is not None, "called from a job"
        self._sleeping.add(job)
        try:
            await self._clock.sleep(max(0, due_ms - self._clock.now_ms()) / 1000)
        finally:
            self._sleeping.discard(job)

    async def _publish(self, record: Record, result: Result) -> None:
        output = result.output
        if output is not None:
            await self._publisher.publish(output.topic, output.message, packed=output.packed, trace=trace_of(record))
        if result.settle is not None:
            await result.settle()

    def _ended(self, job: asyncio.Task[None]) -> None:
        # The progress of the ownership that the job began under: after a rebalance it may be another's.
        record, progress = self._jobs.pop(job)
        self._slot_free.set()
        if job.cancelled():
            return
        error = job.exception()
        if error is None:
            progress.finish(record.offset)
            return
        # Every expected failure is a record by now: this is the log being away, or a bug of the loop.
        log.error("%s: stops at %s:%d: %r", self._stage, record.tp, record.offset, error)
        self._broken = self._broken or error
        self.stop()

    async def _commit_regularly(self, consumer: Consumer) -> None:
        while True:
            await self._clock.sleep(self._limits.commit_every_s)
            await self._commit(consumer)

    async def _commit(self, consumer: Consumer) -> None:
        owned = consumer.assignment()
        offsets = {
            tp: committed
            for tp, progress in self._progress.items()
            if tp in owned and (committed := progress.committable()) is not None
        }
        if not offsets:
            return
        try:
            await consumer.commit(offsets)
        except NotOwner as error:
            log.info("%s: progress not committed, a rebalance is under way: %s", self._stage, error)
        except BusError as error:
            log.warning("%s: progress not committed, tried again soon: %s", self._stage, error)

    async def _assigned(self, owned: frozenset[TopicPartition]) -> None:
        log.info("%s: owns %d partitions", self._stage, len(owned))

    async def _revoked(self, lost: frozenset[TopicPartition]) -> None:
        """Cancel the work of lost partitions: another member does it now."""
        for job, (record, _) in list(self._jobs.items()):
            if record.tp in lost:
                job.cancel()
        for tp in lost:
            self._progress.pop(tp, None)

    async def _drain(self) -> None:
        for job in self._sleeping:
            job.cancel()
        if self._jobs and self._broken is None:
            await asyncio.wait(list(self._jobs), timeout=self._limits.drain_s)

    async def _hand_back(self) -> None:
        """Cancel what did not finish: its records are not committed and will be handed out again."""
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
