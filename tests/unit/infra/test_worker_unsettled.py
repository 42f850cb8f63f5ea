"""What has cost users of other consumers records or memory, one by one, on the log in memory."""

from __future__ import annotations

import asyncio

import pytest

from infra.clock import SystemClock
from infra.errors import BusError
from infra.memory import MemoryBus
from infra.offset_map import decode
from infra.stage import Done, Member
from infra.wire import Publisher
from infra.worker import Limits
from schemas.messages import Episode, Task
from schemas.topics import EPISODES, INIT_RETRY_5S, TABLE, TASKS
from stages.wiring import init_stage
from tests.fast_clock import FastClock
from tests.logs import make_task, read_all, wait_until

LIMITS = Limits(max_in_flight=64, poll_s=0.02, commit_every_s=0.02, drain_s=1.0)


def member(bus, handle, *, clock, limits=LIMITS):
    return Member(init_stage(handle), bus, clock, worker="init-test", limits=limits, first=True)


async def opened(task: Task) -> Done[Episode]:
    return Done(Episode(task=task, host="local:", lease=f"lease-{task.sample}", messages=()))


async def publish(bus, clock, samples, topic=TASKS, *, partition=None, **changes):
    publisher = Publisher(bus, clock, "test")
    for sample in samples:
        await publisher.publish(topic, make_task(sample=sample, samples=10_000, **changes), partition=partition)


async def committed(bus):
    return sum(progress.offset for progress in (await bus.committed("init", TASKS.name)).values())


async def stopped(worker, running):
    worker.stop()
    await asyncio.wait_for(running, 30)


@pytest.fixture
def clock():
    return SystemClock()


@pytest.fixture
async def bus(clock):
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    return bus


async def test_commits_that_the_log_refuses_are_made_up_for_by_a_later_one(clock):
    """The stage goes on meanwhile, and repeats nothing."""

    class Refusing(MemoryBus):
        refusals = 5

        def before_commit(self, group, offsets):
            if self.refusals:
                self.refusals -= 1
                raise BusError("the coordinator is loading")

    bus = Refusing(clock)
    await bus.create_topics(TABLE)
    await publish(bus, clock, range(40))
    worker = member(bus, opened, clock=clock)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: committed(bus), 40)
    await stopped(worker, running)

    assert bus.refusals == 0
    assert len(await read_all(bus, EPISODES)) == 40


async def test_work_that_was_lost_with_its_partition_is_done_when_the_partition_comes_back(bus, clock):
    """It moves away and back: the record is handed out again, and is no redelivery of what is in work."""
    gate, begun, cancelled = asyncio.Event(), [], []

    async def handle(task):
        begun.append(task.sample)
        try:
            await gate.wait()
        except asyncio.CancelledError:
            cancelled.append(task.sample)
            raise
        return await opened(task)

    worker = member(bus, handle, clock=clock)
    for sample in range(TASKS.partitions):
        await publish(bus, clock, [sample], partition=sample)
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: len(begun), TASKS.partitions)
    guest = await bus.join([TASKS.name], "init")
    await wait_until(lambda: len(cancelled), len(guest.assignment()))
    await guest.close()
    await wait_until(lambda: len(begun), TASKS.partitions + len(cancelled))
    gate.set()
    await wait_until(lambda: committed(bus), TASKS.partitions)
    await stopped(worker, running)

    assert cancelled
    assert sorted(begun[TASKS.partitions :]) == sorted(cancelled)
    assert len(await read_all(bus, EPISODES)) == TASKS.partitions


async def test_the_first_records_of_a_partition_that_left_and_came_back_start_after_the_log_knows(clock):
    """Also if that happened while the starts of its first time here were being counted."""

    class Refusing(MemoryBus):
        refused, refuses = 0, True

        def before_commit(self, group, offsets):
            if self.refuses:
                self.refused += 1
                raise BusError("the coordinator is loading")

    bus, counts = Refusing(clock), {}
    await bus.create_topics(TABLE)

    async def handle(task):
        known = (await bus.committed("init", TASKS.name)).get(task.sample)
        counts[task.sample] = known and decode(known)
        return await opened(task)

    for sample in range(TASKS.partitions):
        await publish(bus, clock, [sample], partition=sample)
    worker = member(bus, handle, clock=clock, limits=Limits(poll_s=0.02, commit_every_s=3600, drain_s=1.0))
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: bus.refused, 1)
    guest = await bus.join([TASKS.name], "init")
    left = guest.assignment()
    await guest.close()
    bus.refuses = False
    await wait_until(lambda: len(counts), TASKS.partitions)
    await stopped(worker, running)

    assert left
    assert {sample: {0: 1} for sample in range(TASKS.partitions)} == {
        sample: known and known.unfinished for sample, known in counts.items()
    }


async def test_a_retry_that_is_not_due_stays_held_over_a_rebalance():
    """Partitions are handed out anew, and a pause that was forgotten there would let the retry through early."""
    clock, seen = FastClock(), []
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)

    async def handle(task):
        seen.append((task.attempt, clock.monotonic()))
        return await opened(task)

    await publish(bus, clock, range(8), INIT_RETRY_5S, attempt=1)
    worker = member(bus, handle, clock=clock)
    running = asyncio.create_task(worker.run())
    for arrival in range(3):
        await publish(bus, clock, [8 + arrival])
        guest = await bus.join([TASKS.name, INIT_RETRY_5S.name], "init")
        await guest.close()
        await wait_until(lambda: len([attempt for attempt, _ in seen if not attempt]), arrival + 1)
    await wait_until(lambda: len(seen), 11)
    await stopped(worker, running)

    assert [0] * 3 + [1] * 8 == sorted(attempt for attempt, _ in seen)
    assert all(at >= INIT_RETRY_5S.delay_ms / 1000 for attempt, at in seen if attempt)


async def test_a_worker_keeps_nothing_of_what_it_has_done(bus, clock):
    """Its memory follows what is in flight, not what has passed through it."""
    worker = member(bus, opened, clock=clock)
    running = asyncio.create_task(worker.run())
    for batch in range(5):
        await publish(bus, clock, range(200 * batch, 200 * (batch + 1)))
    await wait_until(lambda: committed(bus), 1000)
    inner = worker._worker
    await wait_until(lambda: inner.in_flight == 0 and not any(p._done for p in inner._progress.values()), True)

    assert (inner.in_flight_bytes, len(inner._waiting), inner._held) == (0, 0, {})
    for progress in inner._progress.values():
        assert (progress.in_flight, progress._unfinished) == (0, {})
    await stopped(worker, running)
