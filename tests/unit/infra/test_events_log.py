"""Stage events on their way to the log."""

from __future__ import annotations

import asyncio

import pytest

from infra.clock import VirtualClock, settle
from infra.errors import BusError
from infra.events import FLUSH_EVERY_S, MAX_PER_RECORD, MAX_WAITING, EventLog
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from schemas.partition import partition_for
from schemas.telemetry import EventKind, StageEvent
from schemas.topics import EVENTS, TABLE
from tests.logs import read_all


class Away(MemoryBus):
    """A log that is away for so many publications."""

    refuse = 0
    meanwhile = staticmethod(lambda: None)

    async def publish(self, topic, value, **where):
        self.meanwhile()
        if self.refuse:
            self.refuse -= 1
            raise BusError("the broker is away")
        return await super().publish(topic, value, **where)


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
async def bus(clock):
    bus = Away(clock)
    await bus.create_topics(TABLE)
    return bus


@pytest.fixture
def log(bus, clock):
    return EventLog(Publisher(bus, clock, "run-1"), clock, "run-1")


def event(number, sample=0, **changes):
    fields = {"run": "r", "group": "g", "stage": "run", "attempt": 0, "kind": EventKind.STARTED, **changes}
    return StageEvent(sample=sample, at_ms=number, **fields)


async def said(bus):
    """Return the messages in the log with their partitions."""
    return [(record.partition, (await unpack(EVENTS, record)).message) for record in await read_all(bus, EVENTS)]


async def numbers(bus, sample=0):
    return [one.at_ms for _, message in await said(bus) for one in message.events if one.sample == sample]


async def test_events_of_a_moment_share_a_record_per_partition(bus, log):
    """All events of a sample lie in its partition, in order, under the worker's name."""
    for number in range(40):
        log.add(event(number, sample=number % 8))
    await log.flush()
    found = await said(bus)

    assert len(found) <= EVENTS.partitions
    assert {"run-1"} == {message.worker for _, message in found}
    assert all(partition_for(f"r/g/{one.sample}", 4) == place for place, message in found for one in message.events)
    assert [[3, 11, 19, 27, 35], [5, 13, 21, 29, 37]] == [await numbers(bus, sample) for sample in (3, 5)]


async def test_nothing_is_published_where_nothing_happened(bus, log):
    """An idle worker is silent."""
    await log.flush()

    assert [] == await said(bus)


async def test_many_events_are_split_into_records_that_fit(bus, log):
    """Each may hold the text of an error; a record has a largest size."""
    for number in range(2 * MAX_PER_RECORD + 1):
        log.add(event(number, detail="ä" * 2_000))
    await log.flush()

    assert [MAX_PER_RECORD, MAX_PER_RECORD, 1] == [len(message.events) for _, message in await said(bus)]
    assert list(range(2 * MAX_PER_RECORD + 1)) == await numbers(bus)


async def test_events_that_no_record_holds_are_dropped_and_the_rest_goes_on(bus, log, caplog):
    """A bug of whoever made them stops nobody."""
    log.add(event(0, detail="x" * 20_000_000))
    await log.flush()
    log.add(event(1))
    await log.flush()

    assert [1] == await numbers(bus)
    assert "1 events dropped" in caplog.text


async def test_events_wait_for_a_log_that_is_away_in_their_order(bus, log):
    """What came meanwhile stays behind what came before."""
    log.add(event(1))
    bus.refuse, bus.meanwhile = 1, lambda: log.add(event(2))
    await log.flush()
    bus.meanwhile = lambda: None
    log.add(event(3))
    await log.flush()

    assert [1, 2, 3] == await numbers(bus)


async def test_a_log_that_is_away_for_long_costs_the_oldest_events_and_says_how_many(bus, log, caplog):
    """Memory is bounded; whoever looks at the events knows that some are missing."""
    for number in range(MAX_WAITING):
        log.add(event(number))
    bus.refuse = 1
    await log.flush()
    for number in range(MAX_WAITING, MAX_WAITING + 5):
        log.add(event(number))
    bus.refuse = 1
    await log.flush()
    await log.flush()

    assert list(range(5, MAX_WAITING + 5)) == await numbers(bus)
    assert "5 events were dropped while the log was away" in caplog.text


async def test_events_are_published_in_the_background(bus, log, clock):
    """Again and again, until the worker ends."""
    running = asyncio.create_task(log.run())
    found = []
    for number in range(3):
        log.add(event(number))
        await settle()
        await clock.advance(FLUSH_EVERY_S)
        found.append(await numbers(bus))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert [[0], [0, 1], [0, 1, 2]] == found
