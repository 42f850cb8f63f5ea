"""The log in memory: the twin of `kafka.py`, for tests and for a demo in one process. Nothing is durable.

It keeps every promise of `bus.py` and imitates what hurts with the real one, so that a worker that is right here is
right there: rebalances are eager (all positions go back to what was committed, unless the listener says otherwise), a
commit of a lost partition is refused, an offset that retention removed is an error, another may hold no record. For
tests `expel` plays a session that ran out, and `MemoryLog` what happens to records. One event loop, one process;
compaction is not played.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infra import topic_shape
from infra.blobs import BlobStore
from infra.blobs.memory import MemoryBlobs
from infra.bus import (
    Committed,
    Consumer,
    Headers,
    Listener,
    Position,
    Reader,
    Record,
    TopicPartition,
)
from infra.clock import Clock, SystemClock, wait_for
from infra.errors import BusError, NotOwner
from infra.memory_group import MemoryGroup, MemoryMember
from infra.memory_log import MemoryLog
from schemas.limits import RECORD_BYTES
from schemas.topics import Topic


class MemoryBus:
    """A log in this process (`infra.bus.Bus`)."""

    def __init__(self, clock: Clock | None = None, *, blobs: BlobStore | None = None) -> None:
        self.clock = clock or SystemClock()
        self.blobs: BlobStore | None = blobs or MemoryBlobs(self.clock)
        self.log = MemoryLog()
        """What it holds; what happens to that from outside is played there."""
        self._groups: dict[str, MemoryGroup] = {}

    async def start(self) -> None:
        """Do nothing: memory is always there."""

    async def close(self) -> None:
        """Wake whoever waits; what was published stays until the process ends."""
        for topic in self.log.topics:
            self.log.tell(topic)

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> Position:
        """Append a record; no partition means: spread evenly."""
        if value is None and key is None:
            raise BusError(f"publishing to {topic}: a record needs a key or a value")
        if key is None and self.log.topic(topic).compacted:
            raise BusError(f"publishing to {topic}: a compacted topic takes no record without a key")
        count = self.log.topic(topic).partitions
        place = self.log.next_in_turn(topic) if partition is None else partition
        if not 0 <= place < count:
            raise BusError(f"publishing to {topic}: no partition {place}, it has {count}")
        size = sum(len(name) + len(text) for name, text in headers) + len(key or b"") + len(value or b"")
        if size > RECORD_BYTES:
            raise BusError(f"publishing to {topic}: {size} bytes, at most {RECORD_BYTES} are taken")
        # A real log suspends its caller: a loop that only publishes must not starve the rest here either.
        await asyncio.sleep(0)
        offset = self.log.end(TopicPartition(topic, place))
        self.log.append(Record(topic, place, offset, self.clock.now_ms(), key, value, tuple(headers)))
        return Position(place, offset)

    async def join(self, topics: Sequence[str], group: str, listener: Listener | None = None) -> Consumer:
        """Join a consumer group; returns with the first assignment."""
        for topic in topics:
            self.log.topic(topic)
        home = self._group(group)
        member = MemoryMember(home, self.log, self.clock, frozenset(topics), listener or Listener())
        await home.join(member)
        return member

    async def read(self, start: Mapping[TopicPartition, int]) -> Reader:
        """Read partitions from these offsets on; an offset that is not in the log raises OffsetLost."""
        for partition, offset in start.items():
            self.log.topic(partition.topic)
            self.log.require(partition, offset)
        return MemoryReader(self.log, self.clock, start)

    async def begin_offsets(self, topic: str) -> dict[int, int]:
        """Return partition -> first offset still in the log."""
        return {part.partition: self.log.begin(part) for part in self.log.partitions(topic)}

    async def end_offsets(self, topic: str) -> dict[int, int]:
        """Return partition -> next offset to be written."""
        return {part.partition: self.log.end(part) for part in self.log.partitions(topic)}

    async def commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Store the progress of a group that nobody has joined."""
        await asyncio.sleep(0)
        home = self._group(group)
        if home.members:
            raise NotOwner(f"group {group} has members: only they may commit")
        for partition in offsets:
            self.log.topic(partition.topic)
        home.store(offsets)

    async def offsets_since(self, topic: str, since_ms: int) -> dict[int, int]:
        """Return partition -> first offset whose timestamp is not before since_ms; the end where none is."""
        return {part.partition: self.log.since(part, since_ms) for part in self.log.partitions(topic)}

    async def committed(self, group: str, topic: str) -> dict[int, Committed]:
        """Return partition -> progress of a group, for partitions that have any."""
        known = self._groups[group].committed if group in self._groups else {}
        return {part.partition: known[part] for part in self.log.partitions(topic) if part in known}

    async def create_topics(self, topics: Iterable[Topic[Any]]) -> list[str]:
        """Create the topics that are missing and return their names."""
        missing = [topic for topic in topics if topic.name not in self.log.topics]
        for topic in missing:
            self.log.create(topic)
        return [topic.name for topic in missing]

    async def check_topics(self, topics: Iterable[Topic[Any]]) -> None:
        """Raise ConfigError listing every topic that is missing or differs from the table."""
        found = {name: topic_shape.shape_of(topic) for name, topic in self.log.topics.items()}
        topic_shape.require(topics, found, prefix="", where="the memory bus")

    def before_commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Let every commit through; a log that refuses some raises BusError here."""

    async def expel(self, consumer: Consumer) -> None:
        """Take a member's partitions away without telling it, as when its session runs out."""
        for home in self._groups.values():
            for member in home.members:
                if member is consumer:
                    member.forget()
                    await home.leave(member)
                    return

    def _group(self, name: str) -> MemoryGroup:
        return self._groups.setdefault(name, MemoryGroup(name, self.log, self.before_commit))


class MemoryReader:
    """Reads whole partitions from given offsets, in no group (`infra.bus.Reader`)."""

    def __init__(self, log: MemoryLog, clock: Clock, start: Mapping[TopicPartition, int]) -> None:
        self._log = log
        self._clock = clock
        self._position = dict(start)
        self._news = log.listen({partition.topic for partition in start})

    async def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        """Return up to max_records records, or none after timeout_s; in offset order per partition."""
        give_up = self._clock.monotonic() + timeout_s
        while True:
            self._news.clear()
            found = self._log.take(self._position, max_records)
            left_s = give_up - self._clock.monotonic()
            if found or left_s <= 0:
                await asyncio.sleep(0)
                return found
            await wait_for(self._news, self._clock, left_s)

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset that will be handed out."""
        return self._position[partition]

    async def close(self) -> None:
        """Stop reading."""
        self._position = {}
        self._log.deafen(self._news)
