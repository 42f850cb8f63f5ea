"""Reading what lies in the log already, from one offset to another."""

from __future__ import annotations

import asyncio

import pytest

from infra.bus import TopicPartition
from infra.clock import VirtualClock, settle
from infra.errors import OffsetLost, WaitTimeout
from infra.memory import MemoryBus
from infra.reading import SILENCE_S, positions, read_between
from schemas.topics import TABLE, TASKS

FIRST, SECOND = TopicPartition(TASKS.name, 0), TopicPartition(TASKS.name, 1)


@pytest.fixture
async def bus():
    bus = MemoryBus(VirtualClock())
    await bus.create_topics(TABLE)
    for partition, count in ((0, 5), (1, 3)):
        for number in range(count):
            await bus.publish(TASKS.name, bytes([number]), partition=partition)
    return bus


async def offsets(bus, start, end):
    return [(record.tp, record.offset) async for record in read_between(bus, bus.clock, start, end)]


async def test_it_ends_where_it_was_told_and_not_where_the_log_does(bus):
    """Each partition from its own start to its own end."""
    found = await offsets(bus, {FIRST: 1, SECOND: 0}, {FIRST: 4, SECOND: 2})
    assert {(FIRST, 1), (FIRST, 2), (FIRST, 3), (SECOND, 0), (SECOND, 1)} == set(found)
    assert [1, 2, 3] == [offset for tp, offset in found if tp == FIRST]


async def test_what_is_written_meanwhile_is_left_out(bus):
    """The end is a moment, and whoever asked for it is answered about that moment."""
    end = positions(TASKS, await bus.end_offsets(TASKS.name))
    await bus.publish(TASKS.name, b"late", partition=1)
    found = await offsets(bus, positions(TASKS, await bus.begin_offsets(TASKS.name)), end)
    assert 8 == len(found)


async def test_an_empty_stretch_gives_nothing(bus):
    """Nothing is waited for."""
    assert [] == await offsets(bus, {FIRST: 5}, {FIRST: 5})


async def test_a_start_that_retention_has_removed_is_an_error(bus):
    """Reading on behind it would pass records over."""
    bus.log.trim(FIRST, 2)
    with pytest.raises(OffsetLost):
        await offsets(bus, {FIRST: 1}, {FIRST: 4})


async def test_a_log_that_falls_silent_before_the_end_is_an_error_that_says_where(bus):
    """Whoever waits for records that are known to be there must not wait for ever."""
    reading = asyncio.ensure_future(offsets(bus, {FIRST: 0}, {FIRST: 9}))
    await settle()
    await bus.clock.advance(SILENCE_S + 1)
    with pytest.raises(WaitTimeout, match=r"waited 60 s for offset 9 of tasks, partition 0; read up to 5"):
        await reading


async def test_a_slow_log_is_waited_for_as_long_as_it_says_something(bus):
    """The limit is on silence, not on the length of the log."""
    reading = asyncio.ensure_future(offsets(bus, {FIRST: 0}, {FIRST: 8}))
    for _ in range(3):
        await settle()
        await bus.clock.advance(SILENCE_S - 1)
        await bus.publish(TASKS.name, b"x", partition=0)
    assert 8 == len(await reading)
