"""A Kafka for one run: in a directory of its own, ended and removed with it.

The topics are made from the table under a prefix, as `rollmill broker topics --create` makes them; clients connect
with the product's settings. A broker that outlived the measuring process would falsify the next one: it is tied to us.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from infra import broker
from infra.bus import Bus
from infra.config import BusConfig
from infra.connect import connected
from schemas.topics import TABLE


@contextmanager
def local_kafka(prefix: str) -> Iterator[BusConfig]:
    """Run a broker and give the settings of its clients.

    Raises:
        infra.broker.errors.LocalBrokerError: it cannot run here; the error says what to do.
    """
    with tempfile.TemporaryDirectory(prefix="rollmill-benchmark-") as folder:
        running = broker.start(Path(folder) / "kafka", detached=False)
        try:
            address = running.status().bootstrap
            assert address is not None, "a started broker has an address"
            yield BusConfig(bootstrap=address, prefix=prefix)
        finally:
            running.stop()


@asynccontextmanager
async def log_with_topics(config: BusConfig) -> AsyncIterator[Bus]:
    """Give a connected bus under whose prefix every topic of the table exists."""
    async with connected(config, client="benchmarks", check=False) as bus:
        await bus.create_topics(TABLE)
        yield bus
