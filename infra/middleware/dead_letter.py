"""What cannot be read goes to `dead` at once, with its original bytes and headers and where it came from.

Poison is not retried: the same bytes would be as unreadable again. The stream behind it goes on, so burying must not
fail on what it buries: a value too large to carry its new headers is cut, with its size in `x-cut-from`; one that is
null becomes empty, since a log takes no record that has neither key nor value.
"""

from __future__ import annotations

from infra.bus import Bus, Headers, Record
from infra.claims import refresh
from infra.clock import Clock
from schemas.limits import BURIED_BYTES
from schemas.topics import DEAD

CAUSE_BYTES = 2_000
"""Longest cause kept in a header, in bytes."""


async def bury(bus: Bus, clock: Clock, record: Record, *, stage: str, cause: str) -> None:
    """Append a record to `dead`, in the partition it came from, and return once that is durable."""
    value, key = record.value or b"", record.key or b""
    headers: Headers = (
        *record.headers,
        ("x-orig-topic", record.topic.encode()),
        ("x-orig-partition", str(record.partition).encode()),
        ("x-orig-offset", str(record.offset).encode()),
        ("x-orig-timestamp-ms", str(record.timestamp_ms).encode()),
        ("x-stage", stage.encode()),
        ("x-cause", cause.encode("utf-8", "backslashreplace")[:CAUSE_BYTES]),
        ("x-failed-at-ms", str(clock.now_ms()).encode()),
    )
    room = max(0, BURIED_BYTES - len(key) - sum(len(name) + len(text) for name, text in headers))
    if len(value) > room:
        headers = (*headers, ("x-cut-from", str(len(value)).encode()))
    await refresh(record, bus)  # the copy may outlive the record by far
    partition = record.partition % DEAD.partitions
    await bus.publish(DEAD.name, value[:room], key=record.key, partition=partition, headers=headers)
