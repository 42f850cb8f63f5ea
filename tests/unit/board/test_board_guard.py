"""A board that stands still or grows ends itself; one that is merely idle does not."""

from __future__ import annotations

import asyncio

import pytest

from infra.board.board import Board
from infra.board.feed import Feed
from infra.board.guard import LOOK_EVERY_S, STALL_S, BoardStuck, Guard, resident_mb
from infra.clock import VirtualClock, settle
from infra.errors import BusError
from infra.memory import MemoryBus
from schemas.topics import EVENTS, TABLE
from tests.logs import read_all


class Away(MemoryBus):
    """A log that may be away."""

    away = False

    async def end_offsets(self, topic):
        if self.away:
            raise BusError("the broker is away")
        return await super().end_offsets(topic)


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
async def bus(clock):
    bus = Away(clock)
    await bus.create_topics(TABLE)
    return bus


@pytest.fixture
def feed(bus, clock):
    return Feed(Board(), bus, clock)


@pytest.fixture
async def guard(bus, clock, feed):
    return Guard(feed, bus, clock, memory_mb=1_000_000)


async def pass_time(clock, seconds):
    for _ in range(int(seconds / LOOK_EVERY_S) + 1):
        await clock.advance(LOOK_EVERY_S)


async def watched(guard):
    watching = asyncio.create_task(guard.watch())
    await settle()
    return watching


async def ended(watching):
    watching.cancel()
    (result,) = await asyncio.gather(watching, return_exceptions=True)
    return result


async def test_records_that_nobody_reads_are_a_standstill(bus, clock, guard):
    """The error names the partition and where it stands."""
    watching = await watched(guard)
    await bus.publish(EVENTS.name, b"x", partition=2)
    await pass_time(clock, STALL_S + 3 * LOOK_EVERY_S)

    with pytest.raises(BoardStuck, match=r"partition 2.*offset 0 of 1"):
        await watching


async def test_a_board_that_reads_or_has_nothing_to_read_goes_on(bus, clock, feed, guard):
    """However far it is behind."""
    watching = await watched(guard)
    await pass_time(clock, 3 * STALL_S)
    for _ in range(5):
        await bus.publish(EVENTS.name, b"x", partition=0)
        await bus.publish(EVENTS.name, b"x", partition=0)
        await pass_time(clock, STALL_S / 2)
        await feed.take((await read_all(bus, EVENTS))[feed.position(0)])
    await pass_time(clock, LOOK_EVERY_S)

    assert guard.behind == 5
    assert isinstance(await ended(watching), asyncio.CancelledError)


async def test_a_log_that_is_away_is_no_standstill(bus, clock, guard):
    """Nothing can be read then, and the board still shows what it knows."""
    watching = await watched(guard)
    await bus.publish(EVENTS.name, b"x", partition=0)
    await pass_time(clock, STALL_S / 2)
    bus.away = True
    await pass_time(clock, 3 * STALL_S)
    bus.away = False
    await pass_time(clock, STALL_S / 2)

    assert isinstance(await ended(watching), asyncio.CancelledError)


async def test_a_board_that_has_grown_ends(guard):
    """The error names the limit."""
    guard.look_at_memory(1_000_000.0)
    guard.look_at_memory(None)
    with pytest.raises(BoardStuck, match=r"board\.memory_mb"):
        guard.look_at_memory(1_000_001.0)


def test_this_process_has_a_size():
    """On Linux; elsewhere nothing is judged."""
    found = resident_mb()

    assert found is None or 5 < found < 100_000
