"""What tests of the sink and the check do again and again."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from infra.clickhouse.client import connect
from infra.clickhouse.sink import Sink
from infra.clock import SystemClock


@asynccontextmanager
async def running_sink(bus, address, **options):
    """A sink at work; it is stopped, or raises what ended it, at the end of the block."""
    sink = Sink(bus, address, SystemClock(), **options)
    work = asyncio.create_task(sink.run())
    try:
        yield sink
    finally:
        sink.stop()
        await asyncio.wait_for(work, 60)


async def until_stored(bus, topic, group="sink"):
    """Wait until the sink has committed everything on a topic."""
    async with asyncio.timeout(60):
        while True:
            ends = {part: end for part, end in (await bus.end_offsets(topic)).items() if end}
            done = await bus.committed(group, topic)
            if all(part in done and done[part].offset >= end for part, end in ends.items()):
                return
            await asyncio.sleep(0.02)


async def rows_of(address, sql, **parameters):
    """The result of one query."""
    client = await connect(address)
    try:
        return [tuple(row) for row in (await client.query(sql, parameters)).result_rows]
    finally:
        await client.close()
