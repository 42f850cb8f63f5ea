"""The buses under the contract, and waits with a limit for what comes from them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

from aiokafka import AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import RecordsToDelete

from infra.bus import Bus, Consumer, Reader, Record, TopicPartition
from infra.kafka import KafkaBus, KafkaLimits
from infra.memory import MemoryBus
from schemas.messages import Task
from schemas.topics import HOUR_MS, Spread, Topic

WAIT_S = 10.0
PREFIXES = itertools.count()
KAFKA_LIMITS = KafkaLimits(heartbeat_s=0.1, session_s=6.0, max_poll_s=1.0, topic_s=0.3, connect_s=5.0)


def topic(name: str, partitions: int) -> Topic[Task]:
    return Topic(
        name=name,
        carries=(Task,),
        partitions=partitions,
        spread=Spread.ROUND_ROBIN,
        producers=(),
        consumers=(),
        retention_ms=HOUR_MS,
    )


WORK = topic("work", 4)
ONE = topic("one", 1)
STATE = replace(topic("state", 1), retention_ms=None)
ALL = frozenset(TopicPartition("work", number) for number in range(4))
"""The partitions of `WORK`."""


@dataclass
class Kit:
    """A bus under test, and what only the world outside it can do."""

    bus: Bus
    trim: Callable[[TopicPartition, int], Awaitable[None]]
    """Removes records as retention does."""
    expel: Callable[[Consumer], Awaitable[None]]
    """Makes the group think that a member is dead, without telling the member."""
    transact: Callable[[TopicPartition, bytes], Awaitable[None]]
    """Writes a record in a transaction of its own: behind it lies an offset that is no record."""


async def memory_kit() -> AsyncIterator[Kit]:
    bus = MemoryBus()

    async def trim(partition: TopicPartition, before: int) -> None:
        bus.log.trim(partition, before)

    async def transact(partition: TopicPartition, value: bytes) -> None:
        await bus.publish(partition.topic, value, partition=partition.partition)
        bus.log.mark(partition)

    await bus.start()
    yield Kit(bus, trim, bus.expel, transact)
    await bus.close()


async def kafka_kit(address: str) -> AsyncIterator[Kit]:
    prefix = f"contract{next(PREFIXES)}."
    bus = KafkaBus(address, prefix=prefix, limits=KAFKA_LIMITS)

    async def trim(partition: TopicPartition, before: int) -> None:
        where = KafkaPartition(prefix + partition.topic, partition.partition)
        await bus._link.admin.delete_records({where: RecordsToDelete(before_offset=before)})

    async def expel(consumer: Consumer) -> None:
        # A member that does not poll for `max_poll_s` leaves the group by itself, and does not notice.
        coordinator = consumer._client._coordinator  # type: ignore[attr-defined]
        await until(lambda: coordinator.member_id == "", "the member was expelled")

    async def transact(partition: TopicPartition, value: bytes) -> None:
        foreign = AIOKafkaProducer(bootstrap_servers=address, transactional_id=f"{prefix}foreign")
        async with foreign, foreign.transaction():
            await foreign.send_and_wait(prefix + partition.topic, value, partition=partition.partition)

    await bus.start()
    yield Kit(bus, trim, expel, transact)
    await bus.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a limit."""
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {WAIT_S} s until {what}"
        await asyncio.sleep(0.01)


async def receive(source: Consumer | Reader, count: int) -> list[Record]:
    """Poll until so many records came, with a limit."""
    found: list[Record] = []
    give_up = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < give_up, f"waited {WAIT_S} s for {count} records, got {len(found)}"
        found += await source.poll(count - len(found), 0.2)
    return found


async def follow(source: Consumer | Reader, partition: TopicPartition, position: int) -> None:
    """Poll until a source has come to this position, with a limit; nothing else may come."""
    give_up = time.monotonic() + WAIT_S
    while source.position(partition) != position:
        assert time.monotonic() < give_up, f"waited {WAIT_S} s for {position}, is at {source.position(partition)}"
        assert [] == await source.poll(10, 0.2)


async def fill(bus: Bus, name: str, count: int, partition: int | None = 0) -> None:
    for number in range(count):
        await bus.publish(name, b"%d" % number, partition=partition)
