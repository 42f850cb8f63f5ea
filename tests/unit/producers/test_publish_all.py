"""Many records at once: within a limit, and nothing behind the back of whoever waits."""

from __future__ import annotations

import asyncio

import pytest

from infra.errors import BusError
from infra.memory import MemoryBus
from infra.wire import Publisher
from producers.publish_all import MAX_UNACKNOWLEDGED, publish_all
from schemas.topics import TABLE, TASKS
from tests.logs import make_task, read_all


class Slow(MemoryBus):
    """A log that counts what is on its way to it, and refuses one record."""

    now = most = asked = 0
    refused = -1

    async def publish(self, topic, value, **where):
        number, self.asked = self.asked, self.asked + 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if number == self.refused:
                raise BusError("refused")
            await asyncio.sleep(0)
            return await super().publish(topic, value, **where)
        finally:
            self.now -= 1


@pytest.fixture
async def bus(clock):
    bus = Slow(clock)
    await bus.create_topics(TABLE)
    return bus


async def test_what_is_on_its_way_is_bounded(bus, clock):
    """A huge group does not fill the memory of the client."""
    many = [make_task(sample=number) for number in range(2 * MAX_UNACKNOWLEDGED)]

    assert await publish_all(Publisher(bus, clock, "test"), TASKS, many) == len(many)
    assert bus.most <= MAX_UNACKNOWLEDGED


async def test_the_first_record_that_is_refused_stops_the_others(bus, clock):
    """Who reports the error, and ends or starts again, must not publish on meanwhile."""
    bus.refused = 5
    many = [make_task(sample=number) for number in range(2 * MAX_UNACKNOWLEDGED)]
    with pytest.raises(BusError, match="refused"):
        await publish_all(Publisher(bus, clock, "test"), TASKS, many)
    then = bus.asked, len(await read_all(bus, TASKS))
    for _ in range(100):
        await asyncio.sleep(0)

    assert {asyncio.current_task()} == asyncio.all_tasks()
    assert then == (bus.asked, len(await read_all(bus, TASKS)))
    assert bus.asked < len(many)


async def test_nothing_to_publish_is_nothing_to_wait_for(bus, clock):
    """And no error."""
    assert await publish_all(Publisher(bus, clock, "test"), TASKS, []) == 0
