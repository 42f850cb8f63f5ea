"""The samples that a cancel's target covers: which there are, and how they ended.

Reads `tasks` and the target's partitions of `trajectories` from the start, once, and may then wait for what is open.
Outcomes count by the arbiter, as everywhere. Nothing is written here.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from infra.bus import Bus, Record, TopicPartition
from infra.clock import Clock
from infra.errors import WaitTimeout
from infra.reading import partition_of, positions, read_between
from infra.wire import unpack
from schemas.arbiter import Arbiter, Ruling
from schemas.cancels import targets
from schemas.codec import DecodeError
from schemas.message import Message
from schemas.messages import SampleId, Task
from schemas.topics import TASKS, TRAJECTORIES, Topic

M = TypeVar("M", bound=Message)

log = logging.getLogger(__name__)

POLL_S = 0.5
"""One poll lasts at most this long, seconds."""

BATCH = 500
"""Most records of one poll."""


class Covered:
    """The samples of one target."""

    def __init__(self, bus: Bus, clock: Clock, target: str) -> None:
        self.admitted: set[SampleId] = set()
        """Those that a task was published for."""
        self._bus = bus
        self._clock = clock
        self._target = target
        self._ended: dict[SampleId, str] = {}
        self._arbiters: defaultdict[str, Arbiter] = defaultdict(Arbiter)
        self._read_to: dict[TopicPartition, int] = {}
        """What `read` has read so far."""

    @property
    def open(self) -> set[SampleId]:
        """Admitted samples without an outcome."""
        return self.admitted - self._ended.keys()

    @property
    def outcomes(self) -> dict[str, int]:
        """How many samples ended how."""
        return dict(sorted(Counter(self._ended[sample] for sample in self.admitted & self._ended.keys()).items()))

    @property
    def all_over(self) -> bool:
        """Tell whether there were samples and each has an outcome; tasks are forgotten before their outcomes."""
        return bool(self.admitted or self._ended) and not self.open

    async def first_task(self) -> Task | None:
        """Return a task of the target that the log holds, if there is one; reads no further than to the first."""
        async with aclosing(self._tasks(*await self._bounds(TASKS))) as tasks:
            return await anext(tasks, None)

    async def read(self) -> None:
        """Read what is in the log now; called again, what has come since."""
        begin, end = await self._unread(TASKS)
        async for task in self._tasks(begin, end):
            self.admitted.add(task.id)
        self._read_to |= end
        begin, end = (self._ours(found) for found in await self._unread(TRAJECTORIES))
        async for record in read_between(self._bus, self._clock, begin, end):
            await self._end(record)
        self._read_to |= end

    async def all_ended(self, limit_s: float) -> None:
        """Return once every admitted sample has an outcome; call `read` first.

        Raises:
            WaitTimeout: some have none after limit_s.
        """
        until = self._clock.monotonic() + limit_s
        reader = await self._bus.read(self._ours(self._read_to))
        try:
            while missing := self.open:
                if self._clock.monotonic() > until:
                    raise WaitTimeout(
                        f"waited {limit_s:g} s for {len(self.admitted)} samples of {self._target!r}: {len(missing)} "
                        f"have no outcome, such as {min(missing)}. The reaper ends those in queues: does it run?"
                    )
                for record in await reader.poll(BATCH, POLL_S):
                    await self._end(record)
        finally:
            await reader.close()

    async def _bounds(self, topic: Topic[M]) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """Return where a topic begins, and its end now."""
        begin = positions(topic, await self._bus.begin_offsets(topic.name))
        return begin, positions(topic, await self._bus.end_offsets(topic.name))

    async def _unread(self, topic: Topic[M]) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """Return where to read a topic from, and its end now."""
        begin, end = await self._bounds(topic)
        return {tp: max(offset, self._read_to.get(tp, 0)) for tp, offset in begin.items()}, end

    async def _tasks(self, begin: dict[TopicPartition, int], end: dict[TopicPartition, int]) -> AsyncGenerator[Task]:
        async with aclosing(read_between(self._bus, self._clock, begin, end)) as records:
            async for record in records:
                task = await self._read(TASKS, record)
                if task is not None and self._covers(task):
                    yield task

    def _ours(self, offsets: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return the partitions of `trajectories` that may hold an outcome of the target."""
        # A foreign run's name may hold a `/` itself, so every beginning of the target may be the run.
        parts = self._target.split("/")
        runs = ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
        wanted = {partition_of(TRAJECTORIES, run) for run in runs}
        return {tp: offset for tp, offset in offsets.items() if tp in wanted}

    async def _end(self, record: Record) -> None:
        trajectory = await self._read(TRAJECTORIES, record)
        if trajectory is None or not self._covers(trajectory.task):
            return
        task = trajectory.task
        ruling = self._arbiters[task.run].rule(task.group, task.sample, task.payload_digest, record.offset)
        if ruling is Ruling.ACCEPTED:
            self._ended[task.id] = str(type(trajectory.outcome).__struct_config__.tag)

    def _covers(self, task: Task) -> bool:
        return self._target in targets(task.run, task.group, task.sample)

    async def _read(self, topic: Topic[M], record: Record) -> M | None:
        try:
            return (await unpack(topic, record, self._bus)).message
        except DecodeError as error:
            log.debug("unreadable record skipped, its stage or the sink buries it: %s", error)
            return None
