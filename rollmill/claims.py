"""Which blobs the records of a run speak of, from the log itself.

Reads every topic with a retention from its start. A record says in its headers whose it is (`ce_subject`); only of one
that does not is the blob opened. What cannot be read names no run, and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.bus import Bus, Record, TopicPartition
from infra.claims import claimed
from infra.clock import Clock
from infra.reading import positions, read_between
from infra.wire import unpack
from schemas.codec import DecodeError
from schemas.topics import TABLE

_TOPICS = {topic.name: topic for topic in TABLE if not topic.compacted}


@dataclass
class RunClaims:
    """What the log holds of a run."""

    records: int = 0
    """Records that name it."""
    digests: set[str] = field(default_factory=set)
    """Blobs that its records speak of."""


async def run_claims(bus: Bus, clock: Clock, run: str) -> RunClaims:
    """Return the blobs of a run, up to the present end of the log.

    Raises:
        infra.errors.BusError: the log or its blob store is away.
    """
    begin: dict[TopicPartition, int] = {}
    end: dict[TopicPartition, int] = {}
    for topic in _TOPICS.values():
        begin |= positions(topic, await bus.begin_offsets(topic.name))
        end |= positions(topic, await bus.end_offsets(topic.name))
    found = RunClaims()
    async for record in read_between(bus, clock, begin, end):
        digest = claimed(record)
        if await _is_of(run, bus, record, has_claim=digest is not None):
            found.records += 1
            found.digests.update([digest] if digest is not None else [])
    return found


async def _is_of(run: str, bus: Bus, record: Record, *, has_claim: bool) -> bool:
    headers = dict(record.headers)
    subject = headers.get("ce_subject")
    if subject is not None:
        return subject.startswith(f"{run}/".encode())
    if not has_claim:
        return False
    topic = _TOPICS.get(headers.get("x-orig-topic", record.topic.encode()).decode(errors="replace"))
    if topic is None:
        return False
    try:
        message = (await unpack(topic, record, bus)).message
    except DecodeError:
        return False
    task = getattr(message, "task", message)
    return bool(getattr(task, "run", None) == run)
