"""Every admitted sample gets a terminal record: what has none when its time is up is expired here.

Reads `tasks` and `trajectories` from the start and keeps the samples in between. A sample's time is up at `reap_at`:
its `start_by` plus all stage budgets plus a grace, so nothing that still may end by itself is reaped; the time since
its task was published during which a stage stood still, because a service was away, is added to that. Two reapers, or
a reaper and a late worker, may both write a terminal record; the first one in the log counts. All liveness rests on
this service: it needs no stage, host or engine to be alive.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable
from typing import Any

from infra.bus import Bus, Reader, Record, TopicPartition
from infra.clock import Clock
from infra.control import ControlView
from infra.middleware.deadline import GRACE_S, reap_at_ms
from infra.outages import away_ms
from infra.terminal import terminal
from infra.wire import Publisher, unpack
from schemas.codec import DecodeError
from schemas.control import Breaker
from schemas.messages import SampleId, Task
from schemas.outcome import Expired
from schemas.topics import TASKS, TRAJECTORIES, Topic

log = logging.getLogger(__name__)

POLL_S = 0.5
"""One poll lasts at most this long, seconds: so late may an end be."""

BATCH = 1_000
"""Most records of one poll."""


Away = Callable[[int], int]
"""Time since a moment, milliseconds since the epoch, during which stages stood still, in milliseconds."""


def never(_: int) -> int:
    """Tell that no stage stood still."""
    return 0


class OpenSamples:
    """Admitted samples without a terminal record, ordered by when they are given up. Pure.

    An end is remembered until the sample would have been given up, since its task may be read later than its outcome;
    after that it is forgotten, so memory follows what is on its way and not the length of the run.
    """

    def __init__(self) -> None:
        self._open: dict[SampleId, Task] = {}
        self._published: dict[SampleId, int] = {}
        self._ended: set[SampleId] = set()
        self._due: list[tuple[int, SampleId]] = []
        self._forget: list[tuple[int, SampleId]] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def remembered(self) -> int:
        """Ended samples that are still remembered."""
        return len(self._ended)

    def admit(self, task: Task, published_ms: int = 0) -> None:
        """Take a task; one that was published again, or has ended, changes nothing."""
        if task.id in self._open or task.id in self._ended:
            return
        self._open[task.id] = task
        self._published[task.id] = published_ms
        heapq.heappush(self._due, (reap_at_ms(task), task.id))

    def end(self, task: Task) -> None:
        """Take the task of a terminal record, also of a sample whose own task was not read yet."""
        if task.id not in self._ended:
            heapq.heappush(self._forget, (reap_at_ms(task), task.id))
        self._ended.add(task.id)
        self._open.pop(task.id, None)
        self._published.pop(task.id, None)

    def overdue(self, now_ms: int, away: Away = never) -> list[Task]:
        """Return the samples to give up; they stay open until their terminal record is read."""
        found = []
        while self._due and self._due[0][0] <= now_ms:
            _, sample = heapq.heappop(self._due)
            if sample not in self._open:
                continue
            due_ms = reap_at_ms(self._open[sample]) + away(self._published[sample])
            if due_ms <= now_ms:
                found.append(self._open[sample])
            else:
                heapq.heappush(self._due, (due_ms, sample))
        while self._forget and self._forget[0][0] <= now_ms:
            self._ended.discard(heapq.heappop(self._forget)[1])
        return found


class Reaper:
    """Ends samples whose time ran out."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._publisher = Publisher(bus, clock, "reaper")
        self._samples = OpenSamples()
        self._control = ControlView(bus, clock)

    async def run(self) -> None:
        """Reap until cancelled; ends with the error of the reader of `control`, should that break."""
        async with self._control.following():
            await self._work()

    async def _work(self) -> None:
        tasks, trajectories = await self._from_start(TASKS), await self._from_start(TRAJECTORIES)
        try:
            await self._catch_up(TRAJECTORIES, trajectories)
            await self._catch_up(TASKS, tasks)
            while True:
                await asyncio.gather(self._read(tasks), self._read(trajectories))
                await self.reap()
        finally:
            await asyncio.gather(tasks.close(), trajectories.close())

    async def reap(self) -> int:
        """Publish `expired` for every overdue sample and return their number."""
        now_ms, breakers = self._clock.now_ms(), self._control.all(Breaker)
        overdue = self._samples.overdue(now_ms, lambda since_ms: away_ms(breakers, since_ms, now_ms))
        for task in overdue:
            cause = f"no outcome {GRACE_S:g} s after its start limit and all stage budgets"
            await self._publisher.publish(TRAJECTORIES, terminal(task, Expired(cause=cause), "reaper"))
        if overdue:
            log.warning("%d samples expired without an outcome", len(overdue))
        return len(overdue)

    async def _catch_up(self, topic: Topic[Any], reader: Reader) -> None:
        """Read what is there already, outcomes first, so that no ended sample looks overdue."""
        for partition, end in (await self._bus.end_offsets(topic.name)).items():
            while reader.position(TopicPartition(topic.name, partition)) < end:
                await self._read(reader)

    async def _from_start(self, topic: Topic[Any]) -> Reader:
        begin = await self._bus.begin_offsets(topic.name)
        return await self._bus.read({TopicPartition(topic.name, part): offset for part, offset in begin.items()})

    async def _read(self, reader: Reader) -> None:
        for record in await reader.poll(BATCH, POLL_S):
            try:
                await self._take(record)
            except DecodeError as error:
                log.debug("reaper skips an unreadable record, its stage buries it: %s", error)

    async def _take(self, record: Record) -> None:
        if record.topic == TASKS.name:
            self._samples.admit((await unpack(TASKS, record, self._bus)).message, record.timestamp_ms)
        else:
            self._samples.end((await unpack(TRAJECTORIES, record, self._bus)).message.task)
