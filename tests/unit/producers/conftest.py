"""What tests of the producers share: a log in memory and what they write to it."""

from __future__ import annotations

import pytest

from infra.clock import VirtualClock
from infra.memory import MemoryBus
from schemas.topics import TABLE


@pytest.fixture
def clock():
    """Time that only the test moves."""
    return VirtualClock()


@pytest.fixture
async def bus(clock):
    """A log with all topics, on that clock."""
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    return bus
