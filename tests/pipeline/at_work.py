"""A pipeline that works on a log of its own, with a policy and a host that can break."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from infra.config import Config
from infra.memory import MemoryBus
from schemas.topics import TABLE
from stages.pipeline import Outside, Pipeline
from tests.fast_clock import FastClock
from tests.pipeline.faulty import FaultyPolicy, RestartingHost


@asynccontextmanager
async def pipeline_at_work(renderer):
    """Give the clock and the log while all three stages run."""
    clock = FastClock()
    bus, host = MemoryBus(clock), RestartingHost(clock)
    await bus.create_topics(TABLE)
    outside = Outside(host=host, policy=FaultyPolicy(renderer), renderer=renderer)
    pipeline = Pipeline(bus, clock, Config(), outside, worker="pipeline")
    async with host:
        running = asyncio.create_task(pipeline.run())
        try:
            yield clock, bus
        finally:
            pipeline.stop()
            await asyncio.wait_for(running, 15)
