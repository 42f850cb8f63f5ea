"""Every implementation of `infra/bus.py`, in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from bus_kit import ONE, STATE, WORK, Kit, kafka_kit, memory_kit

from infra.bus import Bus


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.integration)])
async def kit(request: pytest.FixtureRequest) -> AsyncIterator[Kit]:
    kits = memory_kit() if request.param == "memory" else kafka_kit(request.getfixturevalue("kafka"))
    async for made in kits:
        await made.bus.create_topics([WORK, ONE, STATE])
        yield made


@pytest.fixture
def bus(kit: Kit) -> Bus:
    return kit.bus
