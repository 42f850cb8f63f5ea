"""Opens the log that the configuration names, and checks its topics and blob store: what every service does first.

The one place that decides which log a service runs on, and which blob store goes with it; everything behind it knows
`infra.bus.Bus` and `infra.blobs.BlobStore` alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from infra.blobs import BlobStore
from infra.blobs.directory import DirectoryBlobs
from infra.bus import Bus
from infra.clock import SystemClock
from infra.config import BusConfig
from infra.kafka import KafkaBus, KafkaLimits
from schemas.topics import TABLE


@asynccontextmanager
async def connected(config: BusConfig, *, client: str, check: bool = True) -> AsyncIterator[Bus]:
    """Give a connected bus whose topics are as the table says, and disconnect at the end.

    Args:
        config: where the log is.
        client: name of this program in the broker's logs.
        check: compare the topics with the table, and look for the blob store; off only for the command that creates
            them.

    Raises:
        infra.errors.BusError: nothing answers at the bootstrap address, it refuses us, or there is no blob store where
            one is named.
        infra.errors.ConfigError: a topic is missing or differs from the table, or a certificate cannot be read.
    """
    limits = KafkaLimits(session_s=config.session_timeout_s, heartbeat_s=config.heartbeat_s)
    blobs = blob_store(config)
    bus = KafkaBus(
        config.bootstrap,
        prefix=config.prefix,
        client_id=client,
        limits=limits,
        blobs=blobs,
        security=config.security.open(),
        durability=config.durability(),
    )
    try:
        await bus.start()
        if check:
            await bus.check_topics(TABLE)
            if blobs is not None:
                await blobs.check()
        yield bus
    finally:
        await bus.close()


def blob_store(config: BusConfig) -> BlobStore | None:
    """Return the store that goes with the log, if one is configured; nothing is opened."""
    return DirectoryBlobs(Path(config.blobs), SystemClock()) if config.blobs else None
