"""What cannot be read goes to `dead` at once, with its original bytes and headers and where it came from.

Poison is not retried: the same bytes would be as unreadable again. The stream behind it goes on.
"""

from __future__ import annotations

from infra.bus import Bus, Headers, Record
from infra.clock import Clock
from schemas.topics import DEAD

CAUSE_BYTES = 2_000
"""Longest cause kept in a header, in bytes."""


async def bury(bus: Bus, clock: Clock, record: Record, *, stage: str, cause: str) -> None:
    """Append a record to `dead`, in the partition it came from, and return once that is durable."""
    headers: Headers = (
        *record.headers,
        ("x-orig-topic", record.topic.encode()),
        ("x-orig-partition", str(record.partition).encode()),
        ("x-orig-offset", str(record.offset).encode()),
        ("x-orig-timestamp-ms", str(record.timestamp_ms).encode()),
        ("x-stage", stage.encode()),
        ("x-cause", cause.encode()[:CAUSE_BYTES]),
        ("x-failed-at-ms", str(clock.now_ms()).encode()),
    )
    partition = record.partition % DEAD.partitions
    await bus.publish(DEAD.name, record.value, key=record.key, partition=partition, headers=headers)
