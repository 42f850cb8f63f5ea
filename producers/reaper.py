"""Every admitted sample gets a terminal record: what has none when its time is up is expired here.

Reads `tasks` from the start, and `trajectories` since the first of them, and keeps the samples in between
(`open_samples.py`). A sample's time is up at `reap_at`: its `start_by` plus all stage budgets plus a grace, so nothing
that still may end by itself is reaped; the time since its task was published during which a stage stood still, because
a service was away, is added to that. What is withdrawn on `control` ends at once as cancelled, queued or not, admitted
before or after; a withdrawal is removed once the last `reap_at` of its run has passed, and so is what workers wrote of
outages once nothing depends on it. What nobody can use of `control` goes to `dead` from here alone
(`control_letters.py`). Two reapers, or a reaper and a worker, may both write a terminal record; the first
one in the log counts. Beside that it tidies up once an hour (`upkeep.py`).

All liveness rests on this service: it needs no stage, host or engine to be alive, and no blob store. What lies in the
store is opened beside the rest: a claim check names its sample outside, which is set aside until then; it is not taken
for an end unopened, since nobody else could read a lost one either, and its group would wait for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from infra.blobs import BlobsAway
from infra.bus import Bus, Reader, Record, TopicPartition
from infra.cancellation import PREFIX, Cancellation
from infra.claims import claimed
from infra.clock import Clock
from infra.errors import WaitTimeout
from infra.events import EventLog
from infra.middleware.cancel import outcome_of
from infra.middleware.deadline import GRACE_S, LONGEST_S
from infra.outages import away_ms, forgettable
from infra.reading import SILENCE_S, positions, read_between
from infra.service import worker_name
from infra.side_by_side import alongside
from infra.terminal import terminal
from infra.wire import Publisher, unpack
from producers.control_letters import ControlLetters
from producers.open_samples import OpenSamples
from producers.publish_all import publish_all
from producers.upkeep import EVERY_S, collect_blobs
from schemas.codec import DecodeError
from schemas.control import Breaker, Credit, RunManifest, control_key
from schemas.messages import SampleId, Task
from schemas.outcome import Cancelled, Expired, Outcome
from schemas.telemetry import EventKind, StageEvent
from schemas.topics import CONTROL, HOUR_MS, TASKS, TRAJECTORIES, Topic

log = logging.getLogger(__name__)

POLL_S = 0.5
"""One poll lasts at most this long, seconds: so late may an end be."""

BATCH = 1_000
"""Most records of one poll."""

EARLIER_MS = HOUR_MS
"""Outcomes are read from so long before the first task that is left, milliseconds: clocks of writers differ."""

SAMPLE_DIGITS = 10
"""Most digits of a sibling's number: anybody may have written a header."""

OPENING_S = 0.5
"""Blobs are opened for so long at a time, seconds; then what is due has its turn."""

SAY_EVERY_S = 30.0
"""A blob store that is away is spoken of this often, seconds."""


class Reaper:
    """Ends samples whose time ran out, and those that were withdrawn."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._publisher = Publisher(bus, clock, "reaper")
        self._events = EventLog(self._publisher, clock, worker_name("reaper"))
        self._samples = OpenSamples()
        self._letters = ControlLetters(bus, clock, "reaper")
        self._cancellation = Cancellation(bus, clock, refused=self._letters.take)
        self._seen = 0
        self._heard_ms = 0
        """Timestamp of the latest record that was read."""
        self._look_at = 0.0
        """When to look for outages that may be forgotten, monotonic seconds."""
        self._unopened: deque[Record] = deque()
        self._said_at: float | None = None

    async def run(self) -> None:
        """Reap until cancelled; ends with the error of a reader that breaks."""
        async with self._cancellation.following():
            await self._work()

    async def _work(self) -> None:
        first_ms = await self._first_task_ms()
        tasks = await self._reader(TASKS, await self._bus.begin_offsets(TASKS.name))
        since = await self._bus.offsets_since(TRAJECTORIES.name, first_ms - EARLIER_MS)
        trajectories = await self._reader(TRAJECTORIES, since)
        try:
            await self._catch_up(TRAJECTORIES, trajectories)
            await self._catch_up(TASKS, tasks)
            log.info("reaper: watches every sample since the first task that is left")
            async with alongside(self._tidy_up()):
                while True:
                    await asyncio.gather(self._read(tasks), self._read(trajectories))
                    await self._open()
                    await self._letters.write()
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
        if not len(cancels):
            return 0
        # Every known outage may have put the deadlines off: a cancel that stays too long does no harm.
        put_off_ms = away_ms(self._cancellation.control.all(Breaker), 0, now_ms)
        over = [target for target in cancels if self._is_over(target, now_ms - put_off_ms)]
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

    def _is_over(self, target: str, until_ms: int) -> bool:
        """Tell whether the last deadline that a target's samples had lies before a moment."""
        # A foreign run's name may hold a `/` itself, so every beginning of the target may be the run.
        parts, control = target.split("/"), self._cancellation.control
        runs = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        for run in runs:
            manifest, credit = control.get(f"run/{run}", RunManifest), control.get(f"credit/{run}", Credit)
            if manifest is not None and manifest.paced and not (credit is not None and credit.closed):
                return False  # a feeder that starts again would feed it on: its last deadline is still to come
        known = [last for run in runs if (last := self._samples.last_reap_at_ms(run)) is not None]
        # Where nothing is known of the run, its tasks may have left the log, or are still to come.
        written_ms = control.written_ms(PREFIX + target) or until_ms
        return max(known, default=written_ms + int(LONGEST_S * 1000)) < until_ms

    async def _end(self, ends: Sequence[tuple[Task, Outcome]]) -> None:
        await publish_all(self._publisher, TRAJECTORIES, (terminal(task, outcome, "reaper") for task, outcome in ends))
        for task, outcome in ends:
            self._events.add(_event(task, outcome, self._clock.now_ms()))
        await self._events.flush()

    async def _catch_up(self, topic: Topic[Any], reader: Reader) -> None:
        """Read what is there already, outcomes first, so that no ended sample looks overdue.

        Raises WaitTimeout when nothing comes for SILENCE_S although there is more.
        """
        heard_at, before = self._clock.monotonic(), -1
        ends = positions(topic, await self._bus.end_offsets(topic.name))
        while behind := [tp for tp, end in ends.items() if reader.position(tp) < end]:
            await self._read(reader)
            now, so_far = self._clock.monotonic(), sum(map(reader.position, ends))
            if so_far > before:
                heard_at, before = now, so_far
            elif now - heard_at > SILENCE_S:
                raise WaitTimeout(
                    f"waited {SILENCE_S:g} s for more of {topic.name}; partition {behind[0].partition} is read up to "
                    f"{reader.position(behind[0])} of {ends[behind[0]]}"
                )

    async def _caught_up(self, topic: Topic[Any], reader: Reader) -> bool:
        """Tell whether all that is in a topic at this moment was taken; not to be asked while it is read."""
        ends = await self._bus.end_offsets(topic.name)
        return not self._unopened and all(
            reader.position(TopicPartition(topic.name, part)) >= end for part, end in ends.items()
        )

    async def _first_task_ms(self) -> int:
        """Return the earliest time of a task that the log still holds; now if it holds none."""
        begin = positions(TASKS, await self._bus.begin_offsets(TASKS.name))
        end = positions(TASKS, await self._bus.end_offsets(TASKS.name))
        first = {tp: offset for tp, offset in begin.items() if offset < end[tp]}
        behind = {tp: offset + 1 for tp, offset in first.items()}
        found = [record.timestamp_ms async for record in read_between(self._bus, self._clock, first, behind)]
        return min(found, default=self._clock.now_ms())

    async def _reader(self, topic: Topic[Any], start: dict[int, int]) -> Reader:
        return await self._bus.read(positions(topic, start))

    async def _read(self, reader: Reader) -> None:
        for record in await reader.poll(BATCH, POLL_S):
            self._heard_ms = max(self._heard_ms, record.timestamp_ms)
            if claimed(record) is None:
                await self._take(record)
                continue
            self._unopened.append(record)
            if record.topic == TRAJECTORIES.name and (sample := _named(record)) is not None:
                self._samples.set_aside(sample)

    async def _open(self) -> None:
        """Take what lies in the blob store, for a while; nothing of it while that is away."""
        until = self._clock.monotonic() + OPENING_S
        while self._unopened and self._clock.monotonic() < until:
            try:
                await self._take(self._unopened[0])
            except BlobsAway as error:
                self._say_away(error)
                self._unopened.rotate(-1)  # should it be this one alone, it holds up no other
                return
            self._unopened.popleft()

    async def _take(self, record: Record) -> None:
        try:
            if record.topic == TASKS.name:
                self._samples.admit((await unpack(TASKS, record, self._bus)).message, record.timestamp_ms)
            else:
                self._samples.end((await unpack(TRAJECTORIES, record, self._bus)).message.task)
        except DecodeError as error:
            log.debug("reaper skips an unreadable record, its stage buries it: %s", error)
            if (sample := _named(record)) is not None:
                self._samples.put_back(sample)

    def _say_away(self, error: BlobsAway) -> None:
        now = self._clock.monotonic()
        if self._said_at is None or now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            log.warning(
                "%d records wait for the blob store, their samples are not ended: %s", len(self._unopened), error
            )


def _named(record: Record) -> SampleId | None:
    """Return the sample that a record names in its headers, if it does: `run/group/sample`."""
    parts = (record.header("ce_subject") or b"").decode(errors="replace").rsplit("/", 2)
    if len(parts) != len(("run", "group", "sample")) or not parts[2].isdecimal() or len(parts[2]) > SAMPLE_DIGITS:
        return None
    return SampleId(run=parts[0], group=parts[1], sample=int(parts[2]))


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
