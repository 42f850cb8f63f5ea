"""A member that is handed nothing although there is something ends."""

from __future__ import annotations

import pytest

from infra.bus import TopicPartition
from infra.clock import VirtualClock
from infra.errors import BusError
from infra.memory import MemoryBus
from infra.watchdog import SILENCE_S, Watchdog
from schemas.topics import TABLE

PART = TopicPartition("tasks", 3)


@pytest.fixture
async def bus():
    bus = MemoryBus(VirtualClock())
    await bus.create_topics(TABLE)
    await bus.publish(PART.topic, b"x", partition=PART.partition)
    return bus


async def test_a_silence_with_records_in_the_log_ends_the_member(bus):
    """The error says where, and what was waited for."""
    watchdog = Watchdog(bus, bus.clock, "run")
    await bus.clock.advance(SILENCE_S)
    await watchdog.look({PART: 0})
    await bus.clock.advance(SILENCE_S)

    with pytest.raises(BusError, match=r"tasks, partition 3 has records up to 1 .* at 0, but none was handed out"):
        await watchdog.look({PART: 0})


async def test_a_silence_because_there_is_nothing_is_none(bus):
    """However long it lasts."""
    watchdog = Watchdog(bus, bus.clock, "run")
    for _ in range(3):
        await bus.clock.advance(SILENCE_S)
        await watchdog.look({PART: 1})


async def test_a_record_that_comes_in_the_moment_of_the_look_is_on_its_way(bus):
    """Nobody starts anew because of what was written a moment ago, nor of what was held back until now."""
    watchdog = Watchdog(bus, bus.clock, "run")
    other = TopicPartition("tasks", 4)
    await bus.clock.advance(SILENCE_S)
    await watchdog.look({other: 0})
    await bus.publish(other.topic, b"x", partition=other.partition)
    await bus.clock.advance(SILENCE_S)

    await watchdog.look({PART: 0, other: 0})


async def test_a_member_that_hears_is_left_alone(bus):
    """A record, or having no room for one, begins the time anew."""
    watchdog = Watchdog(bus, bus.clock, "run")
    await bus.clock.advance(SILENCE_S)
    await watchdog.look({PART: 0})
    await bus.clock.advance(SILENCE_S - 1)
    watchdog.heard()
    await bus.clock.advance(SILENCE_S)
    await watchdog.look({PART: 0})
