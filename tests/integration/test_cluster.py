"""Three brokers on this machine: one is killed, comes back, another freezes; and a single broker that freezes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.simulated import made_transcript
from infra import broker
from infra.broker.cluster import LocalCluster
from infra.broker.errors import JarsNotResolved, JavaNotFound, MavenNotFound
from infra.bus import Bus, Committed, TopicPartition
from infra.clock import SystemClock
from infra.config import BusConfig
from infra.connect import connected
from infra.errors import BusError, ConfigError
from infra.kafka import KafkaBus, KafkaLimits
from infra.wire import Publisher, unpack
from rollmill.services import OWNS_PARTITIONS
from rollmill.supervisor import Event, Service, Supervisor
from rollmill.supervisor.readiness import says
from schemas.messages import Rollout
from schemas.outcome import StopReason
from schemas.topics import CONTROL, ROLLOUTS, TABLE, TASKS, TRAJECTORIES
from tests.logs import make_task, read_all

pytestmark = [pytest.mark.integration, pytest.mark.slow]

WAIT_S = 120.0
"""Longest wait for anything here: the machine may be busy with much else."""

PATIENCE_S = 60.0
"""Longest that publishing waits while a broker is lost."""

FROZEN_S = 60.0
"""Twice as long as publishing waits an outage out."""

SAMPLES = 200


@pytest.fixture(scope="module", autouse=True)
def java_or_skip() -> None:
    """Without Java or Maven: a skip, in CI an error."""
    try:
        broker.prepare()
    except (JavaNotFound, MavenNotFound, JarsNotResolved) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def cluster(tmp_path) -> Iterator[LocalCluster]:
    """Three nodes."""
    made = LocalCluster(tmp_path / "cluster")
    made.start()
    yield made
    made.stop()


async def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {WAIT_S} s until {what}"
        await asyncio.sleep(0.05)


class Traffic:
    """Numbered records into `tasks`, as fast as they are acknowledged, and a group that reads them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.acknowledged: set[bytes] = set()
        self.read: set[bytes] = set()

    @asynccontextmanager
    async def flowing(self, *, publishers: int = 4, members: int = 2) -> AsyncIterator[None]:
        """Publish and read while the block runs; an error of any of them leaves it."""
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._publish(number)) for number in range(publishers)]
            running += [group.create_task(self._consume()) for _ in range(members)]
            yield
            for task in running:
                task.cancel()

    async def _publish(self, publisher: int) -> None:
        number = 0
        while True:
            value = f"{publisher}/{number}".encode()
            await self._bus.publish("tasks", value, key=b"k")
            self.acknowledged.add(value)
            number += 1
            await asyncio.sleep(0.01)  # a flow, not a benchmark

    async def _consume(self) -> None:
        member = await self._bus.join(["tasks"], "init")
        try:
            while True:
                done: dict[TopicPartition, Committed] = {}
                for record in await member.poll(100, 0.2):
                    self.read.add(record.value or b"")
                    done[record.tp] = Committed(record.offset + 1)
                if done:
                    await commit(member, done)
        finally:
            await member.close()

    async def goes_on(self, more: int = 200) -> None:
        """Return when so many more records are acknowledged, and all until then are read."""
        acknowledged = len(self.acknowledged)
        await until(lambda: len(self.acknowledged) >= acknowledged + more, f"{more} more records were acknowledged")
        so_far = set(self.acknowledged)
        await until(lambda: so_far <= self.read, "they were read by the group")


async def commit(member, done) -> None:
    """Commit; a commit that fails is repeated by the next one, as the worker has it."""
    try:
        await member.commit(done)
    except BusError:
        return


async def in_sync(bus: KafkaBus, copies: int) -> None:
    """Return when every partition of `tasks` has so many copies in sync."""
    give_up = time.monotonic() + WAIT_S
    while True:
        (found,) = await bus._link.patiently(lambda: bus._link.admin.describe_topics([bus._link.prefix + TASKS.name]))
        fewest = min(len(partition["isr"]) for partition in found["partitions"])
        if fewest >= copies:
            return
        assert time.monotonic() < give_up, f"waited {WAIT_S} s for {copies} copies in sync, there are {fewest}"
        await asyncio.sleep(0.1)


async def late_comer(config: BusConfig) -> None:
    """Connect, read and publish; as a supervised service does, begin again after an error of the bus."""
    while True:
        try:
            async with connected(config, client="late") as bus:
                await bus.publish("control", b"from a late one", key=b"k")
                assert await read_all(bus, CONTROL)
        except BusError:
            await asyncio.sleep(0.1)
        else:
            return


async def test_a_cluster_loses_one_broker_and_loses_nothing(cluster):
    """kill -9 of one, its return, then another one that freezes: publishing and a group go on all the time.

    Every acknowledged record is read. No publish waited as long as its limit, or it would have raised. A program that
    connects while one broker is frozen gets in, too.
    """
    config = BusConfig(bootstrap=cluster.bootstrap, replication=3, min_insync=2)
    # A frozen broker costs a client two requests, 20 s; the limit leaves room for a machine that is busy besides.
    bus = KafkaBus(cluster.bootstrap, limits=KafkaLimits(outage_s=PATIENCE_S), durability=config.durability())
    try:
        await bus.start()
        await bus.create_topics(TABLE)
        await bus.check_topics(TABLE)
        traffic = Traffic(bus)
        async with traffic.flowing():
            await traffic.goes_on()
            os.kill(cluster.node(1).pid or 0, signal.SIGKILL)
            await until(lambda: not cluster.node(1).running, "the killed node was gone")
            await traffic.goes_on()
            await asyncio.to_thread(cluster.start_node, 1)
            await in_sync(bus, 3)
            frozen = cluster.node(2).pid or 0
            os.kill(frozen, signal.SIGSTOP)
            try:
                await traffic.goes_on()
                await asyncio.wait_for(late_comer(config), WAIT_S)
            finally:
                os.kill(frozen, signal.SIGCONT)
            await in_sync(bus, 3)
            await traffic.goes_on()
        written = {record.value for record in await read_all(bus, TASKS)}
    finally:
        await bus.close()

    assert traffic.acknowledged <= written


async def test_topics_are_held_to_the_copies_that_the_configuration_asks_for(cluster):
    """Made with two copies, they are not what a configuration with three asks for; the error names each."""
    two = BusConfig(bootstrap=cluster.bootstrap, replication=2, min_insync=1)
    async with connected(two, client="test", check=False) as bus:
        await bus.create_topics([CONTROL])
        await bus.check_topics([CONTROL])
    three = BusConfig(bootstrap=cluster.bootstrap, replication=3, min_insync=2)
    async with connected(three, client="test", check=False) as bus:
        with pytest.raises(ConfigError, match=r"control: a partition has 2 copies, bus.replication is 3\n.*insync"):
            await bus.check_topics([CONTROL])
    four = BusConfig(bootstrap=cluster.bootstrap, replication=4)
    async with connected(four, client="test", check=False) as bus:
        with pytest.raises(BusError, match=r"creating topic .*tasks.*InvalidReplicationFactor.*3 broker"):
            await bus.create_topics([TASKS])


async def test_a_broker_that_freezes_costs_time_and_no_sample(tmp_path):
    """The only broker is stopped for a minute, which is longer than any limit of a worker.

    Workers end with an error and their supervisor starts them again until the log is back; then every rollout has an
    outcome, and by the rule of the log exactly one of them counts.
    """
    running = broker.start(tmp_path / "kafka", detached=False)
    status = running.status()
    config = BusConfig(bootstrap=str(status.bootstrap), prefix="frozen.")
    settings = ("--set", f"bus.bootstrap={config.bootstrap}", "--set", f"bus.prefix={config.prefix}")
    stage = Service(
        name="eval",
        argv=(sys.executable, "-m", "benchmarks.simulated", "eval", *settings),
        ready=says(OWNS_PARTITIONS, limit_s=WAIT_S),
        instances=2,
    )
    events: list[Event] = []
    try:
        async with connected(config, client="test", check=False) as bus:
            await bus.create_topics(TABLE)
            async with Supervisor([stage], run_dir=tmp_path / "run", on_event=events.append) as supervisor:
                await supervisor.start()
                await publish_rollouts(bus, 0, SAMPLES // 2)
                os.kill(status.pid or 0, signal.SIGSTOP)
                try:
                    await asyncio.sleep(FROZEN_S)  # the minute itself
                finally:
                    os.kill(status.pid or 0, signal.SIGCONT)
                await publish_rollouts(bus, SAMPLES // 2, SAMPLES)
                outcomes = await all_outcomes(bus)
    finally:
        running.stop()

    deaths = [event for event in events if event.what == "died"]
    assert deaths, "a worker that waits for ever is not what the limits promise"
    assert all(event.exit is not None and event.exit.code == 1 for event in deaths), "by an error of ours, no crash"
    assert sorted(outcomes) == list(range(SAMPLES))


async def publish_rollouts(bus: Bus, start: int, stop: int) -> None:
    """Publish one rollout for each sample of one group."""
    publisher = Publisher(bus, SystemClock(), "test")
    for sample in range(start, stop):
        task = make_task(sample=sample, samples=SAMPLES, payload={"tokens": 16, "eval_s": 0.05})
        await publisher.publish(
            ROLLOUTS,
            Rollout(
                task=task,
                transcript=made_transcript(16),
                verdict={},
                stop=StopReason.DONE,
                backend="simulated",
                worker="test",
                tokenizer_digest="",
            ),
        )


async def all_outcomes(bus: Bus) -> dict[int, int]:
    """Return sample -> offset of the outcome that counts, once every sample has one."""
    give_up = time.monotonic() + WAIT_S
    while True:
        first: dict[int, int] = {}
        for record in await read_all(bus, TRAJECTORIES):
            outcome = (await unpack(TRAJECTORIES, record)).message
            first.setdefault(outcome.task.sample, record.offset)
        if len(first) == SAMPLES:
            return first
        assert time.monotonic() < give_up, f"waited {WAIT_S} s for {SAMPLES} outcomes, there are {len(first)}"
        await asyncio.sleep(0.5)
