"""What the worker promises where only a real group of real processes can show it."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.producer import message_accumulator, producer
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

from infra.bus import Committed, Listener
from infra.clock import SystemClock
from infra.errors import NotOwner
from infra.kafka import KafkaBus, KafkaLimits
from infra.stage import Done, Member
from infra.wire import Publisher, unpack
from infra.worker import Limits
from schemas.codec import encode
from schemas.identity import payload_digest
from schemas.messages import Episode
from schemas.topics import DEAD, EPISODES, TABLE, TASKS, TRAJECTORIES
from stages.wiring import init_stage
from tests.logs import make_task, read_all, wait_until

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()
PREFIXES = itertools.count()


def next_prefix():
    return f"worker{os.getpid()}-{next(PREFIXES)}."


@asynccontextmanager
async def connected(kafka, limits, prefix=None):
    bus = KafkaBus(kafka, prefix=prefix or next_prefix(), limits=limits)
    await bus.start()
    await bus.create_topics(TABLE)
    yield bus
    await bus.close()


@pytest.fixture
async def bus(kafka):
    async with connected(kafka, KafkaLimits(session_s=6.0, heartbeat_s=0.5, max_poll_s=1.0)) as bus:
        yield bus


async def count(bus, topic):
    return len(await read_all(bus, topic))


async def publish(bus, sample, **payload):
    task = make_task(sample=sample, samples=8, payload=payload, payload_digest=payload_digest(payload))
    await Publisher(bus, CLOCK, "test").publish(TASKS, task)


async def test_a_job_longer_than_the_groups_limit_causes_no_rebalance(bus, caplog):
    """The loop polls while it runs: a member that is busy is not a member that is gone."""
    began, seen = CLOCK.monotonic(), []

    async def slow(task):
        seen.append(task.sample)
        await CLOCK.sleep(3.0)  # three times what the group allows between two polls
        return Done(Episode(task=task, host="none", lease="lease", messages=()))

    caplog.set_level("INFO", "infra.worker")
    limits = Limits(max_in_flight=2, drain_s=10.0)
    worker = Member(init_stage(slow), bus, CLOCK, worker="slow", limits=limits, first=True)
    running = asyncio.create_task(worker.run())
    for sample in range(3):
        await publish(bus, sample)
    await wait_until(lambda: count(bus, EPISODES), 3)
    worker.stop()
    await running

    assert CLOCK.monotonic() - began >= 6.0
    assert sorted(seen) == [0, 1, 2]
    assert sum("owns" in message for message in caplog.messages) == 1


class Regular:
    """A member that polls, counts its assignments, and may be slow to agree to a rebalance."""

    def __init__(self):
        self.assignments, self.begun, self.tried, self.committed = 0, 0, 0, 0
        self.agrees = asyncio.Event()
        self.agrees.set()

    async def join(self, bus):
        self.consumer = await bus.join(
            [TASKS.name], "regular", Listener(on_rebalance=self._begin, on_assigned=self._own)
        )
        self._tasks = [asyncio.create_task(self._poll())]
        return self

    async def _begin(self):
        self.begun, self.tried = self.begun + 1, 0
        await self.agrees.wait()

    async def _own(self, starts):
        self.assignments += 1
        return {}

    async def _poll(self):
        while True:
            await self.consumer.poll(1, 0.05)

    def commit_regularly(self, every_s):
        self._tasks.append(asyncio.create_task(self._commit(every_s)))

    async def _commit(self, every_s):
        while True:
            self.tried += 1
            self._tasks.append(asyncio.create_task(self._try()))
            await CLOCK.sleep(every_s)

    async def _try(self):
        with suppress(NotOwner):
            await self.consumer.commit({tp: Committed(0) for tp in self.consumer.assignment()})
            self.committed += 1

    async def close(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.consumer.close()


async def test_a_member_that_joins_is_one_rebalance_however_slow_it_is_and_however_often_others_commit(kafka):
    """A commit that is answered after a request to join makes the client join once more, and so on without an end."""
    async with connected(kafka, KafkaLimits(session_s=30.0, heartbeat_s=0.1)) as bus:
        regular, slow = await Regular().join(bus), await Regular().join(bus)
        await wait_until(lambda: regular.assignments, 2)
        slow.agrees.clear()
        regular.commit_regularly(0.02)
        joining = asyncio.create_task(Regular().join(bus))
        await wait_until(lambda: (regular.begun, regular.tried), (2, 20))  # all of them while the slow one thinks
        slow.agrees.set()
        third = await joining
        await wait_until(lambda: regular.committed, regular.committed + 50)
        counts = [member.assignments for member in (regular, slow, third)]
        for member in (third, slow, regular):
            await member.close()

    assert [3, 2, 1] == counts


@pytest.mark.slow
async def test_a_record_that_kills_its_processes_ends_as_failed_and_all_others_go_through(bus, kafka):
    """Killed twice with its worker, then twice alone: one failed outcome, one dead record, nothing else harmed."""
    for sample in range(8):
        await publish(bus, sample, kills=sample == 3)
    settings = [f"bus.bootstrap={kafka}", f"bus.prefix={bus._link.prefix}", "bus.session_timeout_s=6"]
    argv = [sys.executable, "-m", "tests.integration.killer", *(f"--set={setting}" for setting in settings)]

    deaths = 0

    async def supervise():
        nonlocal deaths
        while True:
            worker = await asyncio.create_subprocess_exec(*argv, cwd=ROOT)
            try:
                await worker.wait()
                deaths += 1
            finally:
                if worker.returncode is None:
                    worker.terminate()
                    await worker.wait()

    supervised = asyncio.create_task(supervise())
    await wait_until(lambda: count(bus, TRAJECTORIES), 1, limit_s=180)
    await wait_until(lambda: count(bus, EPISODES), 7)
    supervised.cancel()
    await asyncio.gather(supervised, return_exceptions=True)
    (record,) = await read_all(bus, TRAJECTORIES)
    trajectory = (await unpack(TRAJECTORIES, record)).message
    episodes = [(await unpack(EPISODES, record)).message.task.sample for record in await read_all(bus, EPISODES)]

    assert (3, "by signal 9") == (trajectory.task.sample, trajectory.outcome.cause[-11:])
    assert {0, 1, 2, 4, 5, 6, 7} == set(episodes)
    assert 1 == await count(bus, DEAD)
    assert 2 <= deaths <= 3


class BadName(str):
    """A header name that is no text, as only clients in other languages can write one."""

    __slots__ = ()

    def encode(self, *_):
        """Return what is no UTF-8."""
        return b"\xff\xfe"


async def test_header_names_that_are_no_text_stop_nobody(kafka, monkeypatch):
    """Such a task is worked on, such a poison is buried, and what lies behind them in the partition goes on."""
    for module in (message_accumulator, producer):
        monkeypatch.setattr(module, "DefaultRecordBatchBuilder", _DefaultRecordBatchBuilderPy)
    prefix = next_prefix()
    task = make_task(sample=0, samples=8, payload={}, payload_digest=payload_digest({}))
    async with connected(kafka, KafkaLimits(), prefix) as bus:
        async with AIOKafkaProducer(bootstrap_servers=kafka) as foreign:
            for value in (b"no message", encode(task)):
                where = {"key": b"k", "partition": 0, "headers": [(BadName("x"), b"1")]}
                await foreign.send_and_wait(prefix + TASKS.name, value, **where)
        publisher = Publisher(bus, CLOCK, "test")
        behind = [
            make_task(sample=sample, samples=8, payload={}, payload_digest=payload_digest({})) for sample in (1, 2)
        ]
        for one in behind:
            await publisher.publish(TASKS, one, partition=0)

        async def handle(given):
            return Done(Episode(task=given, host="none", lease="lease", messages=()))

        worker = Member(init_stage(handle), bus, CLOCK, worker="w", first=True)
        running = asyncio.create_task(worker.run())
        await wait_until(lambda: count(bus, EPISODES), 3)
        await wait_until(lambda: count(bus, DEAD), 1)
        worker.stop()
        await running

        done = [(await unpack(EPISODES, record)).message.task.sample for record in await read_all(bus, EPISODES)]
        (dead,) = await read_all(bus, DEAD)
        assert sorted(done) == [0, 1, 2]
        assert (dead.value, dead.header("\\xff\\xfe")) == (b"no message", b"1")
