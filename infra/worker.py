"""The one loop that every stage runs on: fetch, decode, handle, publish, settle, commit, drain.

Promises:

- many jobs run at once per partition and end in any order; a record is committed only when its output is
  acknowledged and every record before it is done, and the commit says which ones after it are (`offsets.py`);
- the loop never stops polling while jobs run, so no job is too long for the group;
- jobs of partitions that stay through a rebalance go on; those of lost ones are cancelled and never committed from
  here, and what they already published is arbitrated like any record;
- after an assignment the first records are started only once the log knows that they were: a record that kills its
  worker is known by that, and runs alone (`isolation.py`);
- while a service that the stage needs is away nothing new is taken, and the membership lives on;
- a record of a retry tier that is not due yet holds up its own partition and nothing else, and takes no place;
- a record that cannot be read, or not be passed on, goes to `dead` and the stream goes on;
- when the log itself is away for longer than its limit the worker ends with a BusError: whoever supervises it starts
  it again, and nothing is lost, since nothing was committed.

The loop knows no stage: it is given a call (handler plus middleware) and the topics to read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from infra.bus import Bus, Committed, Consumer, Listener, Record, TopicPartition
from infra.claims import carried_bytes
from infra.clock import Clock, wait_for
from infra.dead_letter import TOO_LARGE, Death, bury
from infra.errors import BusError, NotOwner, TooLarge
from infra.middleware import Call, Job, Result
from infra.offsets import Progress, Start
from infra.watchdog import Watchdog
from infra.wire import Publisher, trace_of, unpack
from schemas.codec import DecodeError
from schemas.telemetry import EventKind
from schemas.topics import Topic

log = logging.getLogger(__name__)


FIRST_COMMIT_S = 60.0
"""Longest wait for the commit before the first records of a partition are started, seconds."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one worker."""

    max_in_flight: int = 64
    """Records worked on at once."""
    max_bytes: int = 256 * 1024 * 1024
    """Records worked on at once, in bytes as they lie in the log; one record more than that may be."""
    poll_s: float = 0.2
    """Longest wait of one poll, seconds."""
    commit_every_s: float = 0.25
    """Progress is committed this often, seconds."""
    drain_s: float = 10.0
    """Jobs may finish this long after a stop is asked for, seconds; the rest is handed back."""


def always() -> bool:
    """Tell that new work may be taken: for a stage that needs nothing but the log."""
    return True


class _Work(msgspec.Struct, frozen=True):
    """A record in flight, under the ownership that it was handed out in: after a rebalance it may be another's."""

    record: Record
    progress: Progress
    start: Start
    size: int = 0
    """Bytes that it holds in memory."""


class _Sighting(msgspec.Struct, frozen=True):
    """Records of a retry tier that were seen at the same time."""

    last: int
    """Offset of the last of them."""
    at: float
    """When, monotonic seconds."""


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
        on_dead: Callable[[Record, Death], None],
        ready: Callable[[], bool] = always,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._stage = stage
        self._sources = {topic.name: topic for topic in sources}
        self._call = call
        self._publisher = publisher
        self._limits = limits
        self._on_dead = on_dead
        self._ready = ready
        self._progress: dict[TopicPartition, Progress] = {}
        self._committed: dict[TopicPartition, Committed] = {}
        self._held: dict[TopicPartition, float] = {}
        """Partition of a retry tier -> when its next record is due, monotonic seconds."""
        self._sighted: dict[TopicPartition, _Sighting] = {}
        """Partition of a retry tier -> the last one of its records that were not due yet when they came."""
        self._waiting: deque[Record] = deque()
        """Records that were fetched and have no room yet."""
        self._jobs: dict[asyncio.Task[None], _Work] = {}
        self._bytes = 0
        self._consumer: Consumer | None = None
        self._watchdog = Watchdog(bus, clock, stage)
        self._stopping = asyncio.Event()
        self._slot_free = asyncio.Event()
        self._broken: BaseException | None = None

    @property
    def in_flight(self) -> int:
        """Records being worked on."""
        return len(self._jobs)

    @property
    def in_flight_bytes(self) -> int:
        """The same in bytes."""
        return self._bytes

    def stop(self) -> None:
        """Ask the loop to take nothing new, finish what it can and leave."""
        self._stopping.set()
        self._slot_free.set()

    async def run(self) -> None:
        """Work until stopped or cancelled. Raises BusError when the log is away for too long."""
        listener = Listener(on_rebalance=self._rebalancing, on_revoked=self._revoked, on_assigned=self._assigned)
        self._consumer = consumer = await self._bus.join(list(self._sources), self._stage, listener)
        committing = asyncio.create_task(self._commit_regularly(), name=f"{self._stage}: commits")
        committing.add_done_callback(self._stopped_committing)
        try:
            await self._take_work(consumer)
            await self._drain(consumer)
        finally:
            committing.cancel()
            await asyncio.gather(committing, return_exceptions=True)
            await self._hand_back()
            await self._commit(handed_back=True)
            await self._leave(consumer)
        if self._broken is not None:
            raise self._broken

    async def _leave(self, consumer: Consumer) -> None:
        """Close the consumer; if it was something else that ended the work, that is what `run` raises."""
        try:
            await consumer.close()
        except BusError as error:
            if self._broken is None:
                raise
            log.warning("%s: left without a word to the group: %s", self._stage, error)

    async def work_on(self, record: Record) -> None:
        """Work on one record outside any group, and commit nothing."""
        await self._work(_Work(record, Progress(Committed(record.offset)), Start(0)))

    # Taking work.

    async def _take_work(self, consumer: Consumer) -> None:
        while not self._stopping.is_set():
            room = self._limits.max_in_flight - len(self._jobs)
            if room <= 0 or self._bytes >= self._limits.max_bytes or not self._ready():
                self._watchdog.heard()
                await self._wait_for_slot(self._limits.poll_s)
                await consumer.poll(0, 0.0)
                continue
            if not self._waiting:
                await self._fetch(consumer, room)
            if self._ready() and not self._stopping.is_set():  # what came meanwhile waits, or is handed back
                await self._start(consumer, await self._admit(consumer))

    async def _fetch(self, consumer: Consumer, room: int) -> None:
        shut = self._shut()
        found = await consumer.poll(room, self._limits.poll_s, without=shut)
        self._waiting.extend(found)
        if found:
            self._watchdog.heard()
        else:
            self._pass_gaps(consumer)
            open_ = {tp: progress.next_offset for tp, progress in self._progress.items() if tp not in shut}
            await self._watchdog.look(open_)

    def _pass_gaps(self, consumer: Consumer) -> None:
        """Count as done what the log holds no records for; whatever it handed out was started, since nothing waits."""
        for tp, progress in self._progress.items():
            with suppress(NotOwner):
                progress.pass_to(consumer.position(tp))

    async def _wait_for_slot(self, seconds: float) -> None:
        self._slot_free.clear()
        await wait_for(self._slot_free, self._clock, seconds)

    def _shut(self) -> set[TopicPartition]:
        """Return the partitions of which nothing may be started now."""
        now = self._clock.monotonic()
        self._held = {tp: due for tp, due in self._held.items() if due > now}
        return self._held.keys() | {tp for tp, progress in self._progress.items() if progress.full}

    async def _admit(self, consumer: Consumer) -> list[_Work]:
        """Take fetched records into flight as far as there is room for their bytes."""
        admitted = []
        while self._waiting and self._bytes < self._limits.max_bytes:
            record = self._waiting.popleft()
            progress = self._progress.get(record.tp)
            if progress is None:
                continue
            if self._sources[record.topic].delay_ms and await self._hold(consumer, record):
                continue
            start = progress.start(record.offset)
            if start is not None:  # else it was handed out again, and is in flight or done
                work = _Work(record, progress, start, carried_bytes(record))
                self._bytes += work.size
                admitted.append(work)
        return admitted

    async def _hold(self, consumer: Consumer, record: Record) -> bool:
        """Go back to a record of a retry tier that is not due yet, and leave its partition alone until then."""
        wait_s = self._wait_s(record)
        if wait_s <= 0:
            return False
        self._held[record.tp] = self._clock.monotonic() + wait_s
        # Those behind it come again after it: progress needs the order of the log.
        self._waiting = deque(other for other in self._waiting if other.tp != record.tp)
        with suppress(NotOwner):
            await consumer.seek(record.tp, record.offset)
        return True

    def _wait_s(self, record: Record) -> float:
        """Return for how long a record of a retry tier must still wait, seconds.

        By its stamp, which a clock that is ahead of ours may have set; so its delay at most, from when it was seen.
        """
        delay_s = self._sources[record.topic].delay_ms / 1000
        by_stamp_s = (record.timestamp_ms - self._clock.now_ms()) / 1000 + delay_s
        if by_stamp_s <= 0:
            return 0.0
        seen = self._sighted.get(record.tp)
        if seen is None or record.offset > seen.last:
            # What was fetched with it was seen with it: else records would wait for one another, a delay each.
            last = max((other.offset for other in self._waiting if other.tp == record.tp), default=record.offset)
            seen = self._sighted[record.tp] = _Sighting(last, self._clock.monotonic())
        return min(by_stamp_s, seen.at + delay_s - self._clock.monotonic())

    async def _start(self, consumer: Consumer, admitted: Sequence[_Work]) -> None:
        fresh = {work.progress for work in admitted if work.progress.fresh}
        counted = not fresh or await self._count_starts(consumer)
        if counted:
            for progress in fresh:
                progress.fresh = False
        for work in admitted:
            if not counted or self._progress.get(work.record.tp) is not work.progress:
                self._bytes -= work.size  # told to stop, or lost, while the count was committed
                continue
            job = asyncio.create_task(self._work(work))
            self._jobs[job] = work
            job.add_done_callback(self._ended)

    async def _count_starts(self, consumer: Consumer) -> bool:
        """Commit how often what is in flight was started; a rebalance may go on meanwhile.

        Returns whether that is committed: not if the worker was told to stop before.
        """
        give_up = self._clock.monotonic() + FIRST_COMMIT_S
        while not await self._commit():
            if self._stopping.is_set():
                return False
            if self._clock.monotonic() > give_up:
                raise BusError(
                    f"{self._stage}: waited {FIRST_COMMIT_S:g} s to commit the first records of an assignment; "
                    "the group does not settle: look for members that come and go"
                )
            await consumer.poll(0, self._limits.poll_s)
        return True

    # Working.

    async def _work(self, work: _Work) -> None:
        record = work.record
        try:
            received = await unpack(self._sources[record.topic], record, self._bus)
        except DecodeError as error:
            await self._give_up(record, Death(stage=self._stage, cause=str(error)))
            return
        died = partial(work.progress.died, record.offset)
        result = await self._call(Job(self._stage, received, work.start, died))
        try:
            await self._publish(record, result)
        except TooLarge as error:
            # A task at the log's own limit cannot be sent on; the reaper ends its sample.
            await self._give_up(record, Death(stage=self._stage, cause=str(error), kind=TOO_LARGE))

    async def _publish(self, record: Record, result: Result) -> None:
        output = result.output
        if output is not None:
            await self._publisher.publish(
                output.topic,
                output.message,
                packed=output.packed,
                trace=trace_of(record),
                first_failed_ms=result.first_failed_ms,
            )
        if result.death is not None:
            await bury(self._bus, self._clock, record, result.death)
            if result.kind is EventKind.DEAD:
                self._on_dead(record, result.death)
        if result.settle is not None:
            await result.settle()

    async def _give_up(self, record: Record, death: Death) -> None:
        """Bury a record that no terminal record tells of."""
        log.warning("%s: %s:%d to dead, %s: %s", self._stage, record.tp, record.offset, death.kind, death.cause)
        await bury(self._bus, self._clock, record, death)
        self._on_dead(record, death)

    def _ended(self, job: asyncio.Task[None]) -> None:
        work = self._jobs.pop(job)
        self._bytes -= work.size
        self._slot_free.set()
        if job.cancelled():
            return
        error = job.exception()
        if error is None:
            work.progress.finish(work.record.offset)
            return
        # Every expected failure is a record by now: this is the log being away, or a bug of the loop.
        self._break(error, f"{work.record.tp}:{work.record.offset}")

    def _break(self, error: BaseException, where: str) -> None:
        log.error("%s: stops at %s: %r", self._stage, where, error)
        self._broken = self._broken or error
        self.stop()

    # Committing.

    async def _commit_regularly(self) -> None:
        while True:
            await self._clock.sleep(self._limits.commit_every_s)
            await self._commit()

    def _stopped_committing(self, committing: asyncio.Task[None]) -> None:
        if not committing.cancelled() and (error := committing.exception()) is not None:
            self._break(error, "its commits")

    async def _commit(self, *, handed_back: bool = False) -> bool:
        """Commit what has changed; False if that failed: it is tried again."""
        if self._consumer is None:
            return True  # joining: nothing was started yet
        owned = self._consumer.assignment()
        progress = {tp: self._progress[tp].committable(handed_back=handed_back) for tp in owned & self._progress.keys()}
        changed = {tp: done for tp, done in progress.items() if self._committed.get(tp) != done}
        if not changed:
            return True
        try:
            await self._consumer.commit(changed)
        except NotOwner as error:
            log.info("%s: progress not committed, a rebalance is under way: %s", self._stage, error)
            return False
        except BusError as error:
            log.warning("%s: progress not committed, tried again soon: %s", self._stage, error)
            return False
        self._committed |= {tp: done for tp, done in changed.items() if tp in self._progress}
        return True

    # What the group tells.

    async def _rebalancing(self) -> None:
        """Say how far everything is while that still counts: another member may go on from there."""
        await self._commit(handed_back=True)

    async def _revoked(self, lost: frozenset[TopicPartition]) -> None:
        """Cancel the work of lost partitions: another member does it now."""
        for job, work in list(self._jobs.items()):
            if work.record.tp in lost:
                job.cancel()
        for tp in lost:
            self._progress.pop(tp, None)
            self._committed.pop(tp, None)
            self._held.pop(tp, None)
            self._sighted.pop(tp, None)

    async def _assigned(self, starts: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int]:
        """Go on with what was kept, and take up what is new where its last owner left it."""
        log.info("%s: owns %d partitions", self._stage, len(starts))
        kept = starts.keys() & self._progress.keys()
        for tp in starts.keys() - kept:
            self._progress[tp] = Progress(starts[tp])
        self._waiting.clear()  # it is fetched again: nothing of it was started
        return {tp: self._progress[tp].next_offset for tp in kept}

    # Leaving.

    async def _drain(self, consumer: Consumer) -> None:
        """Let jobs finish, and keep the membership meanwhile: their commits count."""
        give_up = self._clock.monotonic() + self._limits.drain_s
        while self._jobs and self._broken is None and (left_s := give_up - self._clock.monotonic()) > 0:
            await self._wait_for_slot(min(left_s, self._limits.poll_s))
            await consumer.poll(0, 0.0)

    async def _hand_back(self) -> None:
        """Cancel what did not finish: its records are not committed and will be handed out again."""
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
