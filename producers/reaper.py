"""Every admitted sample gets a terminal record: what has none when its time is up is expired here.

Reads `tasks` and `trajectories` from the start and keeps the samples in between. A sample's time is up at `reap_at`:
its `start_by` plus all stage budgets plus a grace, so nothing that still may end by itself is reaped; the time since
its task was published during which a stage stood still, because a service was away, is added to that. What is withdrawn
on `control` ends at once as cancelled, queued or not, admitted before or after; a withdrawal is removed once the last
`reap_at` of its run has passed, and so is what workers wrote of outages once nothing depends on it. Two reapers, or a
reaper and a worker, may both write a terminal record; the first one in the log counts. All liveness rests on this
service: it needs no stage, host or engine to be alive. Beside that it tidies up once an hour (`upkeep.py`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Sequence
from typing import Any

from infra.bus import Bus, Reader, Record, TopicPartition
from infra.cancellation import PREFIX, Cancellation
from infra.clock import Clock
from infra.events import EventLog
from infra.middleware.cancel import outcome_of
from infra.middleware.deadline import GRACE_S, LONGEST_S, reap_at_ms
from infra.outages import away_ms, forgettable
from infra.service import alongside, worker_name
from infra.terminal import terminal
from infra.wire import Publisher, unpack
from producers.upkeep import EVERY_S, collect_blobs
from schemas.cancels import Cancels
from schemas.codec import DecodeError
from schemas.control import Breaker, Cancel, Credit, RunManifest, control_key
from schemas.messages import SampleId, Task
from schemas.outcome import Cancelled, Expired, Outcome
from schemas.telemetry import EventKind, StageEvent
from schemas.topics import CONTROL, TASKS, TRAJECTORIES, Topic

log = logging.getLogger(__name__)

POLL_S = 0.5
"""One poll lasts at most this long, seconds: so late may an end be."""

BATCH = 1_000
"""Most records of one poll."""

MAX_UNACKNOWLEDGED = 256
"""Terminal records on their way to the log at once."""


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
        self._fresh: list[SampleId] = []
        self._given_up: set[SampleId] = set()
        self._last: dict[str, int] = {}
        self._ended: set[SampleId] = set()
        self._due: list[tuple[int, SampleId]] = []
        self._forget: list[tuple[int, SampleId]] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def remembered(self) -> int:
        """Ended samples that are still remembered."""
        return len(self._ended)

    @property
    def oldest_ms(self) -> int | None:
        """When the first of the open samples was published, milliseconds since the epoch; None if none is open."""
        return min(self._published.values(), default=None)

    def admit(self, task: Task, published_ms: int = 0) -> None:
        """Take a task; one that was published again, or has ended, changes nothing."""
        self._note(task)
        if task.id in self._open or task.id in self._ended:
            return
        self._open[task.id] = task
        self._published[task.id] = published_ms
        self._fresh.append(task.id)
        heapq.heappush(self._due, (reap_at_ms(task), task.id))

    def end(self, task: Task) -> None:
        """Take the task of a terminal record, also of a sample whose own task was not read yet."""
        self._note(task)
        if task.id not in self._ended:
            heapq.heappush(self._forget, (reap_at_ms(task), task.id))
        self._ended.add(task.id)
        self._open.pop(task.id, None)
        self._published.pop(task.id, None)
        self._given_up.discard(task.id)

    def last_reap_at_ms(self, run: str) -> int | None:
        """Return when the last sample of a run is given up, as far as known; None if the run has none."""
        return self._last.get(run)

    def withdrawn(self, cancels: Cancels, *, only_new: bool) -> list[tuple[Task, Cancel]]:
        """Return the open samples that are withdrawn, each once; they stay open until their terminal record is read.

        Args:
            cancels: what is withdrawn.
            only_new: nothing was withdrawn since the last question, so only samples admitted since are looked at.
        """
        looked_at, self._fresh = self._fresh if only_new else list(self._open), []
        found = []
        for sample in looked_at if len(cancels) else ():
            cancel = cancels.of(sample.run, sample.group, sample.sample)
            if cancel is not None and sample in self._open and sample not in self._given_up:
                self._given_up.add(sample)
                found.append((self._open[sample], cancel))
        return found

    def overdue(self, now_ms: int, away: Away = never) -> list[Task]:
        """Return the samples to give up; they stay open until their terminal record is read."""
        found = []
        while self._due and self._due[0][0] <= now_ms:
            _, sample = heapq.heappop(self._due)
            if sample not in self._open or sample in self._given_up:
                continue
            due_ms = reap_at_ms(self._open[sample]) + away(self._published[sample])
            if due_ms <= now_ms:
                self._given_up.add(sample)
                found.append(self._open[sample])
            else:
                heapq.heappush(self._due, (due_ms, sample))
        while self._forget and self._forget[0][0] <= now_ms:
            self._ended.discard(heapq.heappop(self._forget)[1])
        return found

    def _note(self, task: Task) -> None:
        self._last[task.run] = max(reap_at_ms(task), self._last.get(task.run, 0))


class Reaper:
    """Ends samples whose time ran out, and those that were withdrawn."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._publisher = Publisher(bus, clock, "reaper")
        self._events = EventLog(self._publisher, clock, worker_name("reaper"))
        self._samples = OpenSamples()
        self._cancellation = Cancellation(bus, clock)
        self._seen = 0
        self._heard_ms = 0
        """Timestamp of the latest record that was read."""
        self._look_at = 0.0
        """When to look for outages that may be forgotten, monotonic seconds."""

    async def run(self) -> None:
        """Reap until cancelled; ends with the error of a reader that breaks."""
        async with self._cancellation.following():
            await self._work()

    async def _work(self) -> None:
        tasks, trajectories = await self._from_start(TASKS), await self._from_start(TRAJECTORIES)
        try:
            await self._catch_up(TRAJECTORIES, trajectories)
            await self._catch_up(TASKS, tasks)
            async with alongside(self._tidy_up()):
                while True:
                    await asyncio.gather(self._read(tasks), self._read(trajectories))
                    await self.withdraw()
                    await self.reap()
                    await self.forget()
                    await self.forget_outages(tasks)
        finally:
            await asyncio.gather(tasks.close(), trajectories.close())

    async def _tidy_up(self) -> None:
        while True:
            if self._bus.blobs is not None:
                await collect_blobs(self._bus.blobs, self._clock, self._heard_ms)
            await self._clock.sleep(EVERY_S)

    async def reap(self) -> int:
        """Publish `expired` for every overdue sample and return their number."""
        now_ms, breakers = self._clock.now_ms(), self._cancellation.control.all(Breaker)
        expired = Expired(cause=f"no outcome {GRACE_S:g} s after its start limit and all stage budgets")
        given_up = self._samples.overdue(now_ms, lambda since_ms: away_ms(breakers, since_ms, now_ms))
        overdue = [(task, expired) for task in given_up]
        await self._end(overdue)
        if overdue:
            log.warning("%d samples expired without an outcome", len(overdue))
        return len(overdue)

    async def withdraw(self) -> int:
        """Publish `cancelled` for every open sample that is withdrawn and return their number."""
        only_new, self._seen = self._seen == self._cancellation.changes, self._cancellation.changes
        found = self._samples.withdrawn(self._cancellation.cancels, only_new=only_new)
        await self._end([(task, outcome_of(cancel)) for task, cancel in found])
        if found:
            log.info("%d samples cancelled, such as %s", len(found), found[0][0].id)
        return len(found)

    async def forget(self) -> int:
        """Remove the withdrawals that no sample of their run can need any more and return their number."""
        cancels, now_ms = self._cancellation.cancels, self._clock.now_ms()
        over = [target for target in cancels if self._is_over(target, now_ms)]
        for target in over:
            await self._bus.publish(CONTROL.name, None, key=f"{PREFIX}{target}".encode(), partition=0)
            cancels.put(target, None)
            log.info("the cancel of %s is removed: the run's last deadline has passed", target)
        return len(over)

    async def forget_outages(self, tasks: Reader) -> int:
        """Remove, once in a while, what workers wrote of outages that put nothing off any more; return how many.

        A task or a record of `control` that was not read yet might depend on them: then another time will do.
        """
        control, now_ms = self._cancellation.control, self._clock.now_ms()
        if self._clock.monotonic() < self._look_at:
            return 0
        self._look_at = self._clock.monotonic() + EVERY_S
        if not forgettable(control.all(Breaker), now_ms, now_ms):
            return 0
        if not (await control.caught_up() and await self._caught_up(TASKS, tasks)):
            return 0
        cancelled = (control.written_ms(PREFIX + target) for target in self._cancellation.cancels)
        waiting = (self._samples.oldest_ms, *cancelled)
        needed_ms = min((began_ms for began_ms in waiting if began_ms is not None), default=now_ms)
        over = forgettable(control.all(Breaker), needed_ms, now_ms)
        for breaker in over:
            await self._bus.publish(CONTROL.name, None, key=control_key(breaker).encode(), partition=0)
        if over:
            log.info("the outages that %d workers wrote of are forgotten: nothing is on its way since", len(over))
        return len(over)

    def _is_over(self, target: str, now_ms: int) -> bool:
        # A foreign run's name may hold a `/` itself, so every beginning of the target may be the run.
        parts, control = target.split("/"), self._cancellation.control
        runs = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        for run in runs:
            manifest, credit = control.get(f"run/{run}", RunManifest), control.get(f"credit/{run}", Credit)
            if manifest is not None and manifest.paced and not (credit is not None and credit.closed):
                return False  # a feeder that starts again would feed it on: its last deadline is still to come
        known = [last for run in runs if (last := self._samples.last_reap_at_ms(run)) is not None]
        # Where nothing is known of the run, its tasks may have left the log, or are still to come.
        written_ms = control.written_ms(PREFIX + target) or now_ms
        # Every known outage may have put the deadlines off: a cancel that stays too long does no harm.
        put_off_ms = away_ms(control.all(Breaker), 0, now_ms)
        return max(known, default=written_ms + int(LONGEST_S * 1000)) + put_off_ms < now_ms

    async def _end(self, ends: Sequence[tuple[Task, Outcome]]) -> None:
        for start in range(0, len(ends), MAX_UNACKNOWLEDGED):
            batch = [terminal(task, outcome, "reaper") for task, outcome in ends[start : start + MAX_UNACKNOWLEDGED]]
            await asyncio.gather(*(self._publisher.publish(TRAJECTORIES, record) for record in batch))
        for task, outcome in ends:
            self._events.add(_event(task, outcome, self._clock.now_ms()))
        await self._events.flush()

    async def _catch_up(self, topic: Topic[Any], reader: Reader) -> None:
        """Read what is there already, outcomes first, so that no ended sample looks overdue."""
        for partition, end in (await self._bus.end_offsets(topic.name)).items():
            while reader.position(TopicPartition(topic.name, partition)) < end:
                await self._read(reader)

    async def _caught_up(self, topic: Topic[Any], reader: Reader) -> bool:
        """Tell whether all that is in a topic at this moment was taken; not to be asked while it is read."""
        ends = await self._bus.end_offsets(topic.name)
        return all(reader.position(TopicPartition(topic.name, part)) >= end for part, end in ends.items())

    async def _from_start(self, topic: Topic[Any]) -> Reader:
        begin = await self._bus.begin_offsets(topic.name)
        return await self._bus.read({TopicPartition(topic.name, part): offset for part, offset in begin.items()})

    async def _read(self, reader: Reader) -> None:
        for record in await reader.poll(BATCH, POLL_S):
            self._heard_ms = max(self._heard_ms, record.timestamp_ms)
            try:
                await self._take(record)
            except DecodeError as error:
                log.debug("reaper skips an unreadable record, its stage buries it: %s", error)

    async def _take(self, record: Record) -> None:
        if record.topic == TASKS.name:
            self._samples.admit((await unpack(TASKS, record, self._bus)).message, record.timestamp_ms)
        else:
            self._samples.end((await unpack(TRAJECTORIES, record, self._bus)).message.task)


def _event(task: Task, outcome: Outcome, at_ms: int) -> StageEvent:
    """Return the event of an end, for whoever still believes the sample in a stage."""
    kind = EventKind.CANCELLED if isinstance(outcome, Cancelled) else EventKind.EXPIRED
    cause = outcome.cause if isinstance(outcome, Cancelled | Expired) else ""
    return StageEvent(
        run=task.run,
        group=task.group,
        sample=task.sample,
        attempt=task.attempt,
        stage="reaper",
        kind=kind,
        at_ms=at_ms,
        detail=cause,
    )
