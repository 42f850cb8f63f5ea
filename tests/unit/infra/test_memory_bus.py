"""What only the memory bus has: its assignor, and time that a test controls."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from infra.bus import TopicPartition
from infra.clock import VirtualClock, settle
from infra.memory import MemoryBus
from infra.memory_group import share
from schemas.topics import CONTROL, TASKS

PARTITIONS = st.integers(1, 12).map(lambda count: [TopicPartition("t", number) for number in range(count)])


@given(PARTITIONS, st.integers(1, 6), st.randoms())
def test_shares_are_complete_balanced_and_sticky(partitions, members, random):
    """Every partition has one owner, loads differ by one at most, and a balanced assignment stays as it is."""
    before = [set() for _ in range(members)]
    for partition in partitions:
        random.choice(before).add(partition)
    topics = frozenset({"t"})
    shares = share(partitions, [(topics, frozenset(owned)) for owned in before])
    again = share(partitions, [(topics, owned) for owned in shares])

    assert sorted(partition for owned in shares for partition in owned) == partitions
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert again == shares


@given(PARTITIONS, st.integers(1, 6))
def test_a_member_that_joins_moves_no_more_than_its_share(partitions, members):
    """Nobody gives up more than the newcomer needs."""
    topics = frozenset({"t"})
    settled = share(partitions, [(topics, frozenset())] * members)
    joined = share(partitions, [(topics, owned) for owned in settled] + [(topics, frozenset())])

    assert sum(len(before - after) for before, after in zip(settled, joined[:-1], strict=True)) == len(joined[-1])


def test_partitions_go_only_to_members_that_read_their_topic():
    """A member never owns a partition of a topic that it did not ask for."""
    partitions = [TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)]
    shares = share(partitions, [(frozenset({"a"}), frozenset()), (frozenset({"a", "b"}), frozenset())])

    assert {partition.topic for partition in shares[0]} == {"a"}


async def test_a_poll_waits_on_the_bus_clock():
    """An empty poll ends when virtual time has passed, without real waiting."""
    clock = VirtualClock()
    bus = MemoryBus(clock)
    await bus.create_topics([TASKS])
    member = await bus.join(["tasks"], "g")
    polling = asyncio.create_task(member.poll(1, 3600.0))
    await settle()
    waiting = not polling.done()
    await clock.advance(3600.0)

    assert waiting
    assert await polling == []


async def test_a_poll_wakes_for_a_record_before_its_time():
    """A record ends the wait at once, with the time of the bus clock on it."""
    clock = VirtualClock()
    bus = MemoryBus(clock)
    await bus.create_topics([CONTROL])
    reader = await bus.read({TopicPartition("control", 0): 0})
    polling = asyncio.create_task(reader.poll(1, 3600.0))
    await settle()
    await bus.publish("control", b"v", key=b"k")
    (record,) = await polling

    assert record.timestamp_ms == clock.now_ms()
