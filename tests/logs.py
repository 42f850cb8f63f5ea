"""What tests of the pipeline share: sample tasks, reading a whole topic, waiting for a condition."""

from __future__ import annotations

import asyncio
import inspect
import time

from infra.bus import TopicPartition
from schemas.identity import payload_digest
from schemas.messages import Task

FAR_MS = 4_000_000_000_000
"""A start limit that no test reaches."""


def make_task(**changes) -> Task:
    """Return a task of the demo's family; without `samples` it is the last of its group."""
    payload = changes.pop("payload", {"size": 5, "index": 1})
    fields = {
        "run": "test",
        "group": "g0",
        "sample": 0,
        "samples": changes.get("sample", 0) + 1,
        "source": "tests",
        "payload": payload,
        "payload_digest": payload_digest(payload),
        "family": "keydoor",
        "seed": 7,
        "start_by_ms": FAR_MS,
    }
    return Task(**{**fields, **changes})


async def read_all(bus, topic):
    """Return the records of a topic, partition by partition."""
    begin, end = await bus.begin_offsets(topic.name), await bus.end_offsets(topic.name)
    reader = await bus.read({TopicPartition(topic.name, part): offset for part, offset in begin.items()})
    found = []
    try:
        while any(reader.position(TopicPartition(topic.name, part)) < last for part, last in end.items()):
            found += await reader.poll(1000, 0.5)
    finally:
        await reader.close()
    return found


async def wait_until(value, wanted, *, limit_s: float = 30.0):
    """Wait until value() (or what it awaits) is at least wanted."""
    until = time.monotonic() + limit_s
    while True:
        found = value()
        if inspect.isawaitable(found):
            found = await found
        if found >= wanted:
            return
        assert time.monotonic() < until, f"waited {limit_s} s for {wanted}, found {found}"
        await asyncio.sleep(0.005)
