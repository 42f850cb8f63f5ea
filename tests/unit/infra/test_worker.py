"""The one loop that every stage runs on, on the in-memory log."""

from __future__ import annotations

import asyncio

import pytest

from infra.bus import Committed, TopicPartition
from infra.clock import SystemClock
from infra.dead_letter import DeadLetter, Death
from infra.errors import BusError, Failure
from infra.isolation import LOG_AWAY
from infra.memory import MemoryBus
from infra.middleware import Output, Result
from infra.offset_map import decode
from infra.offsets import Progress, Start
from infra.stage import Done, Member, Stage
from infra.terminal import terminal
from infra.watchdog import SILENCE_S
from infra.wire import Publisher, unpack
from infra.worker import Limits, Worker
from schemas.identity import payload_digest
from schemas.messages import Episode, Task
from schemas.outcome import Boundary, Failed, FailureKind
from schemas.telemetry import EventKind
from schemas.topics import (
    DEAD,
    EPISODES,
    EVENTS,
    INIT_RETRY_5M,
    INIT_RETRY_5S,
    INIT_RETRY_30S,
    TABLE,
    TASKS,
    TRAJECTORIES,
)
from stages.wiring import init_stage
from tests.fast_clock import FastClock
from tests.logs import make_task, read_all, wait_until

CLOCK = SystemClock()
LIMITS = Limits(max_in_flight=8, poll_s=0.02, commit_every_s=0.02, drain_s=1.0)


@pytest.fixture
async def bus():
    bus = MemoryBus()
    await bus.create_topics(TABLE)
    await bus.start()
    yield bus
    await bus.close()


def member(bus, handle, *, limits=LIMITS, clock=CLOCK, alone=None):
    return Member(init_stage(handle), bus, clock, worker="init-test", limits=limits, first=True, alone=alone)


async def opened(task: Task) -> Done[Episode]:
    return Done(Episode(task=task, host="local:", lease=f"lease-{task.sample}", messages=()))


async def publish(bus, count, **changes):
    publisher = Publisher(bus, CLOCK, "test")
    for sample in range(count):
        await publisher.publish(TASKS, make_task(sample=sample, samples=count, **changes))


async def episodes(bus):
    return [(await unpack(EPISODES, record)).message for record in await read_all(bus, EPISODES)]


async def count(bus, topic):
    return len(await read_all(bus, topic))


async def committed(bus):
    return sum(progress.offset for progress in (await bus.committed("init", TASKS.name)).values())


async def stopped(worker, running):
    worker.stop()
    await asyncio.wait_for(running, 30)


async def test_every_task_becomes_one_output_and_is_committed(bus):
    """The plain path: publish, handle, publish, commit."""
    worker = member(bus, opened)
    await publish(bus, 20)

    running = asyncio.create_task(worker.run())
    await wait_until(lambda: committed(bus), 20)
    await stopped(worker, running)

    assert set(range(20)) == {episode.task.sample for episode in await episodes(bus)}


async def test_jobs_of_one_partition_run_at_once(bus):
    """A slow record does not hold up the ones behind it."""
    gate, seen = asyncio.Event(), []

    async def handle(task):
        seen.append(task.sample)
        if task.sample == 0:
            await gate.wait()
        return await opened(task)

    worker = member(bus, handle)
    await publish(bus, 5)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: len(seen), 5)
    gate.set()
    await stopped(worker, running)

    assert len(await episodes(bus)) == 5


async def test_what_a_poll_brings_after_the_stop_is_not_begun(bus):
    """Rolling upgrades would start a full house only to cancel it."""
    seen = []

    async def handle(task):
        seen.append(task.sample)
        return await opened(task)

    worker = member(bus, handle)
    loop = worker._worker
    fetch = loop._fetch

    async def fetch_and_be_stopped(consumer, room):
        await fetch(consumer, room)
        if loop._waiting:
            worker.stop()

    loop._fetch = fetch_and_be_stopped
    await publish(bus, 20)
    await asyncio.wait_for(worker.run(), 30)

    assert ([], 0) == (seen, await committed(bus))
    running = asyncio.create_task((again := member(bus, handle)).run())
    await wait_until(lambda: committed(bus), 20)
    await stopped(again, running)
    assert sorted(seen) == list(range(20))


async def test_an_unfinished_record_is_handed_out_again_after_a_stop(bus):
    """What did not end within the drain is not committed, and nothing else is repeated."""
    never, seen = asyncio.Event(), []

    async def stuck(task):
        if task.sample == 1:
            await never.wait()
        return await opened(task)

    async def again(task):
        seen.append(task.sample)
        return await opened(task)

    first = member(bus, stuck, limits=Limits(max_in_flight=8, poll_s=0.02, commit_every_s=0.02, drain_s=0.0))
    await publish(bus, 3)
    running = asyncio.create_task(first.run())
    await wait_until(lambda: committed(bus), 2)
    await stopped(first, running)
    second = member(bus, again)
    running = asyncio.create_task(second.run())
    await wait_until(lambda: committed(bus), 3)
    await stopped(second, running)

    assert [1] == seen


async def test_an_output_is_settled_after_it_is_in_the_log(bus):
    """The order at the end of a job: publish, acknowledged, settle."""
    found = []

    async def handle(task):
        async def settle():
            found.append(len(await read_all(bus, EPISODES)))

        done = await opened(task)
        return Done(done.message, settle)

    worker = member(bus, handle)
    await publish(bus, 1)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: len(found), 1)
    await stopped(worker, running)

    assert [1] == found


async def test_a_failure_of_the_system_is_tried_again_and_then_ends_as_failed():
    """After the delays of its kind: one terminal record with the cause and no reward, and one dead letter."""
    clock, attempts = FastClock(factor=1000), []
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)

    async def handle(task):
        attempts.append(task.attempt)
        raise Failure(FailureKind.INFRASTRUCTURE, Boundary.ENVIRONMENT, "the host burns")

    worker = member(bus, handle, clock=clock)
    await publish(bus, 1)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: count(bus, DEAD), 1)
    await stopped(worker, running)
    (record,) = await read_all(bus, TRAJECTORIES)
    trajectory = (await unpack(TRAJECTORIES, record)).message
    (letter,) = map(DeadLetter, await read_all(bus, DEAD))

    assert [0, 1, 2, 3] == attempts
    assert [1, 1, 1] == [await count(bus, tier) for tier in (INIT_RETRY_5S, INIT_RETRY_30S, INIT_RETRY_5M)]
    assert (3, "the host burns") == (trajectory.task.attempt, trajectory.outcome.cause)
    assert clock.monotonic() >= 5 + 30 + 300
    assert ("init.retry.5m", "init", "infrastructure", 4) == (
        letter.original.topic,
        letter.death.stage,
        letter.death.kind,
        letter.death.attempts,
    )
    assert letter.died_ms - letter.death.first_failed_ms >= 335_000


async def test_a_failure_that_would_repeat_ends_the_sample_at_once(bus):
    """A bad task is not tried again, and is kept for whoever mends the cause."""

    async def handle(task):
        raise Failure(FailureKind.INVALID_TASK, Boundary.TASK, "unknown family 'chess'; known: keydoor")

    worker = member(bus, handle)
    await publish(bus, 1)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: committed(bus), 1)
    await stopped(worker, running)
    (record,) = await read_all(bus, TRAJECTORIES)
    trajectory = (await unpack(TRAJECTORIES, record)).message

    (letter,) = map(DeadLetter, await read_all(bus, DEAD))

    assert isinstance(trajectory.outcome, Failed)
    assert "chess" in trajectory.outcome.cause
    assert ("tasks", "invalid_task", 1) == (letter.original.topic, letter.death.kind, letter.death.attempts)


async def test_a_record_is_settled_after_its_terminal_record_and_its_dead_letter():
    """In this order: whatever a crash cuts off is made again, and no dead letter is without its outcome."""
    order = []

    class Noting(MemoryBus):
        async def publish(self, topic, value, **where):
            order.append(topic)
            return await super().publish(topic, value, **where)

    async def settle():
        order.append("settled")

    trajectory = terminal(make_task(), Failed(kind=FailureKind.HANDLER, boundary=Boundary.STAGE, cause=""), "init")

    async def call(job):
        death = Death(stage="init", cause="oops", kind="handler", attempts=1)
        return Result(EventKind.FAILED, Output(TRAJECTORIES, trajectory), settle, death=death)

    noting = Noting()
    await noting.create_topics(TABLE)
    await publish(noting, 1)
    order.clear()
    worker = Worker(
        bus=noting,
        clock=CLOCK,
        stage="init",
        sources=(TASKS,),
        call=call,
        publisher=Publisher(noting, CLOCK, "test"),
        limits=LIMITS,
        on_dead=lambda record, death: None,
    )
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: committed(noting), 1)
    await stopped(worker, running)

    assert [TRAJECTORIES.name, DEAD.name, "settled"] == order


async def test_a_marker_at_the_end_of_a_partition_is_no_lag_and_no_silence():
    """A foreign producer's transaction leaves one: an idle member commits past it, and has nothing to wait for."""
    clock = FastClock(factor=2_000)
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    await publish_to(bus, 3, [0])
    bus.log.mark(TopicPartition(TASKS.name, 3))
    worker = member(bus, opened, clock=clock, limits=Limits(poll_s=20.0, commit_every_s=20.0, drain_s=60.0))
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: committed(bus), 2)
    since = clock.monotonic()
    await wait_until(lambda: clock.monotonic() - since, 4 * SILENCE_S)
    await stopped(worker, running)  # it would have ended with an error


async def test_poison_is_reported_as_dead(bus):
    """In the events of its stage, since no terminal record tells of it."""
    subject = (("ce_subject", b"r/g/3"), ("attempt", b"1"))
    await bus.publish(TASKS.name, b"\xc1", partition=3, headers=subject)
    worker = member(bus, opened)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: committed(bus), 1)
    await stopped(worker, running)
    (record,) = await read_all(bus, EVENTS)
    (event,) = (await unpack(EVENTS, record)).message.events

    assert (EventKind.DEAD, "r", "g", 3, 1) == (event.kind, event.run, event.group, event.sample, event.attempt)
    assert event.detail.startswith("poison, tasks:3:0: not msgpack")


async def test_a_bug_in_a_handler_is_a_failure_and_the_stage_goes_on(bus):
    """An unexpected exception costs its own sample an attempt and nothing else."""

    async def handle(task):
        if task.sample == 0:
            raise ZeroDivisionError("oops")
        return await opened(task)

    worker = member(bus, handle)
    await publish(bus, 4)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: committed(bus), 4)
    await stopped(worker, running)

    assert {1, 2, 3} == {episode.task.sample for episode in await episodes(bus)}
    assert len(await read_all(bus, INIT_RETRY_5S)) == 1


async def test_unreadable_bytes_go_to_dead_with_their_origin_and_the_stream_goes_on(bus):
    """Poison is kept as it was, and nobody waits behind it."""
    await bus.publish(TASKS.name, b"\xc1 not msgpack", key=b"k", partition=3, headers=(("mine", b"1"),))
    await publish(bus, 2)
    worker = member(bus, opened)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: committed(bus), 3)
    await stopped(worker, running)
    (dead,) = await read_all(bus, DEAD)

    assert (b"\xc1 not msgpack", b"k", 3) == (dead.value, dead.key, dead.partition)
    assert {"mine": b"1", "x-orig-topic": b"tasks", "x-orig-offset": b"0"}.items() <= dict(dead.headers).items()
    assert len(await episodes(bus)) == 2


async def test_a_task_past_its_start_limit_expires_without_being_started(bus):
    """`start_by` is checked before the handler sees the task."""
    started = []

    async def handle(task):
        started.append(task)
        return await opened(task)

    worker = member(bus, handle)
    await publish(bus, 1, start_by_ms=1)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: committed(bus), 1)
    await stopped(worker, running)
    (record,) = await read_all(bus, TRAJECTORIES)

    assert "deadline" in (await unpack(TRAJECTORIES, record)).message.outcome.cause
    assert [] == started


async def test_a_log_that_refuses_ends_the_worker_and_commits_nothing(bus):
    """Nothing is lost when an output cannot be written: the record is handed out again."""

    class Refusing(MemoryBus):
        async def publish(self, topic, value, **where):
            if topic == EPISODES.name:
                raise BusError("the disk is full")
            return await super().publish(topic, value, **where)

    refusing = Refusing()
    await refusing.create_topics(TABLE)
    await publish(refusing, 1)
    worker = member(refusing, opened)

    with pytest.raises(BusError, match="disk is full"):
        await asyncio.wait_for(worker.run(), 30)

    assert await committed(refusing) == 0


async def test_the_work_of_a_lost_partition_is_cancelled_and_another_member_does_it(bus):
    """At once: what it would still do could only be thrown away."""
    never, cancelled, done = asyncio.Event(), [], []

    async def stuck(task):
        try:
            await never.wait()
        except asyncio.CancelledError:
            cancelled.append(task.sample)
            raise

    async def does(task):
        done.append(task.sample)
        return await opened(task)

    first, second = member(bus, stuck, limits=Limits(poll_s=0.02, commit_every_s=0.02, drain_s=0)), member(bus, does)
    await publish(bus, 32)
    running = [asyncio.create_task(first.run())]
    await wait_until(lambda: first._worker.in_flight, 32)
    running.append(asyncio.create_task(second.run()))
    await wait_until(lambda: len(cancelled), 1)
    lost = list(cancelled)
    await wait_until(lambda: len(done), len(lost))
    moved, kept = set(done), first._worker.in_flight
    await stopped(first, running[0])
    await wait_until(lambda: committed(bus), 32)
    await stopped(second, running[1])

    assert (set(lost), 32 - len(lost)) == (moved, kept)
    assert list(range(32)) == sorted(done)


async def test_a_record_that_a_rebalance_hands_out_again_is_not_worked_on_twice(bus):
    """A partition that stays goes back to its committed offset; what is in work or done there is known."""
    gate, seen = asyncio.Event(), []

    async def handle(task):
        seen.append(task.sample)
        if task.sample == 0:
            await gate.wait()
        return await opened(task)

    worker = member(bus, handle)
    publisher = Publisher(bus, CLOCK, "test")
    for sample in range(4):
        await publisher.publish(TASKS, make_task(sample=sample, samples=4), partition=0)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: len(seen), 4)
    guest = await bus.join([TASKS.name], "init")
    assert TopicPartition(TASKS.name, 0) not in guest.assignment()
    await publisher.publish(TASKS, make_task(sample=4, samples=5), partition=0)
    await wait_until(lambda: len(seen), 5)
    gate.set()
    await guest.close()
    await wait_until(lambda: committed(bus), 5)
    await stopped(worker, running)

    assert list(range(5)) == seen
    assert 5 == len(await episodes(bus))


async def test_what_ended_is_committed_before_the_worker_leaves(bus):
    """A stop repeats nothing, however seldom progress is committed on the way."""
    worker = member(bus, opened, limits=Limits(poll_s=0.02, commit_every_s=3600, drain_s=1.0))
    await publish(bus, 5)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: count(bus, EPISODES), 5)
    await stopped(worker, running)

    assert await committed(bus) == 5


class Ahead:
    """The clock of a machine that is an hour ahead; a bus takes its stamps from it."""

    def __init__(self, clock):
        self._clock = clock
        self.monotonic, self.sleep = clock.monotonic, clock.sleep

    def now_ms(self):
        """Return the wrong time."""
        return self._clock.now_ms() + 3_600_000


async def vanish(bus, worker, running):
    """End a worker as kill -9 does: its partitions go to others, and it says nothing more."""
    await bus.expel(worker._worker._consumer)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def publish_to(bus, partition, samples):
    publisher = Publisher(bus, CLOCK, "test")
    for sample in samples:
        await publisher.publish(TASKS, make_task(sample=sample, samples=100), partition=partition)


async def progress_of(bus, partition):
    return (await bus.committed("init", TASKS.name))[partition]


async def told(bus, unfinished, *, upper):
    """Wait until the group's progress says that just these, so often started, are not done."""

    async def known():
        progress = (await bus.committed("init", TASKS.name)).get(0, Committed(0))
        found = decode(progress)
        return found is not None and (found.unfinished, found.upper) == (unfinished, upper)

    await wait_until(known, True)


async def test_a_worker_that_vanishes_leaves_only_what_was_in_flight_to_repeat(bus):
    """Done records behind an unfinished one are in the commit, so its heir does not run them again."""
    never, again = asyncio.Event(), []

    async def stuck(task):
        if task.sample in {1, 3}:
            await never.wait()
        return await opened(task)

    async def heir(task):
        again.append(task.sample)
        return await opened(task)

    first = member(bus, stuck)
    await publish_to(bus, 0, range(6))
    running = asyncio.create_task(first.run())
    await wait_until(lambda: count(bus, EPISODES), 4)

    await told(bus, {1: 1, 3: 1}, upper=6)
    await vanish(bus, first, running)
    second = member(bus, heir)
    running = asyncio.create_task(second.run())
    await wait_until(lambda: committed(bus), 6)
    await stopped(second, running)

    assert [1, 3] == sorted(again)


async def test_the_first_records_of_an_assignment_start_after_the_log_knows(bus):
    """A record that kills its worker at once has left its start behind."""
    counts = []

    async def handle(task):
        counts.append(decode(await progress_of(bus, 0)).unfinished)
        return await opened(task)

    worker = member(bus, handle, limits=Limits(poll_s=0.02, commit_every_s=3600, drain_s=1))
    await publish_to(bus, 0, [0])
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: len(counts), 1)
    await stopped(worker, running)

    assert [{0: 1}] == counts


async def killed_by(bus, samples, times):
    """Let workers vanish with these samples in flight, so often."""
    never = asyncio.Event()

    async def stuck(task):
        if task.sample in samples:
            await never.wait()
        return await opened(task)

    for time in range(times):
        worker = member(bus, stuck)
        running = asyncio.create_task(worker.run())
        await told(bus, dict.fromkeys(samples, time + 1), upper=4)
        await vanish(bus, worker, running)


async def test_a_record_that_was_twice_in_flight_when_its_worker_vanished_runs_alone(bus):
    """The others are none of its business; where its own process ends well, all is as ever."""
    alone = []

    async def run_alone(record, limit_s):
        alone.append(record.offset)
        return 0

    await publish_to(bus, 0, range(4))
    await killed_by(bus, {2}, times=2)
    await publish_to(bus, 0, [4])
    worker = member(bus, opened, alone=run_alone)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: committed(bus), 5)
    await stopped(worker, running)

    assert [2] == alone
    assert {0, 1, 3, 4} == {episode.task.sample for episode in await episodes(bus)}
    assert [] == await read_all(bus, DEAD)


async def test_a_record_that_kills_its_own_process_twice_ends_as_failed_and_goes_to_dead(bus):
    """Its sample has an outcome with the cause, its bytes are kept, and the stream goes on."""
    codes = iter([-9, -9])

    async def run_alone(record, limit_s):
        return next(codes)

    await publish_to(bus, 0, range(4))
    await killed_by(bus, {2}, times=2)
    worker = member(bus, opened, alone=run_alone)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: committed(bus), 4)
    await stopped(worker, running)
    (record,) = await read_all(bus, TRAJECTORIES)
    (letter,) = map(DeadLetter, await read_all(bus, DEAD))
    trajectory = (await unpack(TRAJECTORIES, record)).message
    events = [
        event for record in await read_all(bus, EVENTS) for event in (await unpack(EVENTS, record)).message.events
    ]

    assert trajectory.task.sample == 2
    assert "ended its own process twice in init, the last time by signal 9" in trajectory.outcome.cause
    assert (2, "crashed", 1) == (letter.original.offset, letter.death.kind, letter.death.attempts)
    assert [2] == [event.sample for event in events if event.kind is EventKind.DEAD]


async def test_a_process_that_found_the_log_away_says_nothing_against_its_record(bus):
    """The worker ends, as for any outage, and the record is handed out again."""

    async def run_alone(record, limit_s):
        return LOG_AWAY

    await publish_to(bus, 0, range(4))
    await killed_by(bus, {2}, times=2)
    worker = member(bus, opened, alone=run_alone)
    with pytest.raises(BusError, match="found the log away"):
        await asyncio.wait_for(worker.run(), 30)

    assert Start(2) == Progress(await progress_of(bus, 0)).start(2)
    assert [] == await read_all(bus, TRAJECTORIES)


async def test_a_retry_that_is_not_due_takes_no_place(bus):
    """One place, a full retry tier, and new tasks go through; each retry comes when it is due."""
    clock, seen = FastClock(), []
    slow = MemoryBus(clock)
    await slow.create_topics(TABLE)

    async def handle(task):
        seen.append((task.attempt, clock.monotonic()))
        return await opened(task)

    publisher = Publisher(slow, clock, "test")
    for sample in range(8):
        await publisher.publish(INIT_RETRY_5S, make_task(sample=sample, samples=16, attempt=1))
    for sample in range(8, 16):
        await publisher.publish(TASKS, make_task(sample=sample, samples=16))
    worker = member(slow, handle, limits=Limits(max_in_flight=1, poll_s=0.2, drain_s=1.0), clock=clock)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: len(seen), 16)
    await stopped(worker, running)

    assert [0] * 8 + [1] * 8 == [attempt for attempt, _ in seen]
    assert all(at >= INIT_RETRY_5S.delay_ms / 1000 for attempt, at in seen if attempt)


async def test_a_retry_that_is_stamped_in_the_future_waits_its_delay_and_takes_no_other_ones():
    """A worker with a wrong clock wrote it; from when it was seen at the latest, its delay runs."""
    clock, seen = FastClock(), {}
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)

    async def handle(task):
        seen[task.sample] = clock.monotonic()
        return await opened(task)

    async def retried(sample, topic):
        began = clock.monotonic()
        await Publisher(bus, clock, "test").publish(topic, make_task(sample=sample, samples=4, attempt=1), partition=0)
        return began

    worker = member(bus, handle, limits=Limits(poll_s=0.2, drain_s=1.0), clock=clock)
    running = asyncio.create_task(worker.run())
    bus.clock = Ahead(clock)
    ahead = [await retried(sample, INIT_RETRY_5S) for sample in (0, 1)]
    bus.clock = clock
    await wait_until(lambda: len(seen), 2)
    after = await retried(2, INIT_RETRY_30S)
    await wait_until(lambda: len(seen), 3)
    await stopped(worker, running)

    assert all(seen[sample] - ahead[0] >= INIT_RETRY_5S.delay_ms / 1000 for sample in (0, 1))
    assert seen[2] - after >= INIT_RETRY_30S.delay_ms / 1000 - 0.01  # a stamp is whole milliseconds


async def test_records_beyond_the_byte_budget_wait_and_none_is_lost(bus):
    """The budget bounds what is in flight, in any mix of sizes, and every record has its turn."""
    at_once, most = 0, 0

    async def handle(task):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return await opened(task)

    payload = {"text": "x" * 10_000}
    await publish(bus, 40, payload=payload, payload_digest=payload_digest(payload))
    limits = Limits(max_in_flight=64, max_bytes=25_000, poll_s=0.02, commit_every_s=0.02, drain_s=1.0)
    worker = member(bus, handle, limits=limits)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: count(bus, EPISODES), 40)
    await stopped(worker, running)

    assert most == 3


async def test_a_rebalance_hands_work_back_without_suspicion(bus):
    """Records that move between living members are never suspects, however often."""
    never, alone = asyncio.Event(), []

    async def stuck(task):
        await never.wait()

    async def run_alone(record, limit_s):
        alone.append(record.offset)
        return 0

    await publish_to(bus, 0, range(3))
    for _ in range(4):
        worker = member(bus, stuck, limits=Limits(poll_s=0.02, commit_every_s=0.02, drain_s=0), alone=run_alone)
        running = asyncio.create_task(worker.run())
        await wait_until(lambda worker=worker: worker._worker.in_flight, 3)
        await stopped(worker, running)

    assert [] == alone


class Outage:
    """What a test says is away; `run` ends as it is told."""

    def __init__(self):
        self.away, self.asked, self.broken, self.longest_s = True, 0, asyncio.Event(), 0.0

    def ready(self):
        self.asked += 1
        return not self.away

    def still_s(self):
        return 0.0

    async def run(self):
        await self.broken.wait()
        raise RuntimeError("cannot look")


async def test_while_a_service_is_away_nothing_new_is_taken_and_the_membership_lives(bus):
    """What is in work goes on; when the service is back the stage does too."""
    outage, seen, end = Outage(), [], asyncio.Event()
    outage.away = False

    async def handle(task):
        seen.append(task.sample)
        await end.wait()
        return await opened(task)

    stage = Stage(name="init", sources=(TASKS,), sink=EPISODES, handle=handle)
    worker = Member(stage, bus, CLOCK, worker="init-test", limits=LIMITS, outages=outage)
    running = asyncio.create_task(worker.run())
    await publish(bus, 3)
    await wait_until(lambda: len(seen), 3)
    outage.away = True
    await publish_to(bus, 1, range(3, 6))
    asked = outage.asked
    await wait_until(lambda: outage.asked, asked + 5)
    during = list(seen)
    end.set()
    await wait_until(lambda: count(bus, EPISODES), 3)
    outage.away = False
    await wait_until(lambda: count(bus, EPISODES), 6)
    await stopped(worker, running)

    assert sorted(during) == [0, 1, 2]


async def test_a_worker_that_cannot_find_out_when_a_service_is_back_ends(bus):
    """It would take nothing for ever; whoever supervises it starts it again."""
    outage = Outage()
    stage = Stage(name="init", sources=(TASKS,), sink=EPISODES, handle=opened)
    running = asyncio.create_task(Member(stage, bus, CLOCK, worker="w", limits=LIMITS, outages=outage).run())
    await wait_until(lambda: outage.asked, 2)
    outage.broken.set()

    with pytest.raises(RuntimeError, match="cannot look"):
        await asyncio.wait_for(running, 30)
