"""Many records to the log at once, within a limit: all are durable when it returns, or none goes on being sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeVar

from infra.side_by_side import together
from infra.wire import Publisher
from schemas.message import Message
from schemas.topics import Topic

M = TypeVar("M", bound=Message)

MAX_UNACKNOWLEDGED = 256
"""Records on their way to the log at once."""


async def publish_all(publisher: Publisher, topic: Topic[M], records: Iterable[M]) -> int:
    """Publish records and return their number once all are durable.

    Raises:
        infra.errors.BusError: one of them was not acknowledged in time; what was not sent by then never is.
    """
    gate = asyncio.Semaphore(MAX_UNACKNOWLEDGED)

    async def one(record: M) -> None:
        async with gate:
            await publisher.publish(topic, record)

    waiting = [one(record) for record in records]
    await together(waiting)
    return len(waiting)
