"""Opens the log that the configuration names, and checks its topics: what every service does first.

The one place that decides which log a service runs on; everything behind it knows `infra.bus.Bus` alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.bus import Bus
from infra.config import BusConfig
from infra.kafka import KafkaBus, KafkaLimits
from schemas.topics import TABLE


@asynccontextmanager
async def connected(config: BusConfig, *, client: str, check: bool = True) -> AsyncIterator[Bus]:
    """Give a connected bus whose topics are as the table says, and disconnect at the end.

    Args:
        config: where the log is.
        client: name of this program in the broker's logs.
        check: compare the topics with the table; off only for the command that creates them.

    Raises:
        infra.errors.BusError: nothing answers at the bootstrap address.
        infra.errors.ConfigError: a topic is missing or differs from the table.
    """
    limits = KafkaLimits(session_s=config.session_timeout_s, heartbeat_s=config.heartbeat_s)
    bus = KafkaBus(config.bootstrap, prefix=config.prefix, client_id=client, limits=limits)
    try:
        await bus.start()
        if check:
            await bus.check_topics(TABLE)
        yield bus
    finally:
        await bus.close()
