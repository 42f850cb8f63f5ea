"""The log in memory: the twin of `kafka.py`, for tests and for a demo in one process. Nothing is durable.

It keeps every promise of `bus.py` and imitates what hurts with the real one, so that a worker that is right here is
right there: rebalances are eager (all positions go back to what was committed, unless the listener says otherwise), a
commit of a lost partition is refused, an offset that retention removed is an error, another may hold no record. `trim`
plays the retention, `mark` the end of a transaction and `expel` a session that ran out; they exist for tests. One event
loop, one process; compaction is not played.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
from infra.errors import BusError, NotOwner, OffsetLost
from schemas.limits import METADATA_BYTES, RECORD_BYTES
from schemas.topics import Topic

T = TypeVar("T")


@dataclass
class _Partition:
    """The records of one partition that are still kept."""

    begin: int = 0
    records: list[Record | None] = field(default_factory=list)
    """By offset, from `begin` on; None where there is a marker instead."""

    @property
    def end(self) -> int:
        return self.begin + len(self.records)

    def holds(self, offset: int) -> bool:
        """Tell whether reading may continue at this offset."""
        return self.begin <= offset <= self.end

    def after(self, offset: int, most: int) -> tuple[list[Record], int]:
        """Return up to so many records from an offset on, with the offset that comes next."""
        found: list[Record] = []
        while not found and (part := self.records[(at := offset - self.begin) : at + most]):
            found = [record for record in part if record is not None]
            offset += len(part)
        return found, offset


@dataclass
class _Group:
    """A consumer group: its members in the order they joined, and its progress."""

    members: list[MemoryMember] = field(default_factory=list)
    committed: dict[TopicPartition, Committed] = field(default_factory=dict)
    rebalancing: asyncio.Lock = field(default_factory=asyncio.Lock)


class MemoryBus:
    """A log in this process (`infra.bus.Bus`)."""

    def __init__(self, clock: Clock | None = None, *, blobs: BlobStore | None = None) -> None:
        self.clock = clock or SystemClock()
        self.blobs: BlobStore | None = blobs or MemoryBlobs(self.clock)
        self._topics: dict[str, Topic[Any]] = {}
        self._log: dict[TopicPartition, _Partition] = {}
        self._groups: dict[str, _Group] = {}
        self._turn: dict[str, itertools.count[int]] = {}
        self._waiting: defaultdict[str, list[asyncio.Event]] = defaultdict(list)
        """Topic -> who wants to hear of its next record, in an order that does not depend on addresses."""

    async def start(self) -> None:
        """Do nothing: memory is always there."""

    async def close(self) -> None:
        """Wake whoever waits; what was published stays until the process ends."""
        for topic in self._topics:
            self._tell(topic)

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
        if key is None and self._topic(topic).compacted:
            raise BusError(f"publishing to {topic}: a compacted topic takes no record without a key")
        count = self._topic(topic).partitions
        place = next(self._turn[topic]) % count if partition is None else partition
        if not 0 <= place < count:
            raise BusError(f"publishing to {topic}: no partition {place}, it has {count}")
        size = sum(len(name) + len(text) for name, text in headers) + len(key or b"") + len(value or b"")
        if size > RECORD_BYTES:
            raise BusError(f"publishing to {topic}: {size} bytes, at most {RECORD_BYTES} are taken")
        # A real log suspends its caller: a loop that only publishes must not starve the rest here either.
        await asyncio.sleep(0)
        log = self._log[TopicPartition(topic, place)]
        log.records.append(Record(topic, place, log.end, self.clock.now_ms(), key, value, tuple(headers)))
        self._tell(topic)
        return Position(place, log.end - 1)

    async def join(self, topics: Sequence[str], group: str, listener: Listener | None = None) -> Consumer:
        """Join a consumer group; returns with the first assignment."""
        for topic in topics:
            self._topic(topic)
        home = self._groups.setdefault(group, _Group())
        member = MemoryMember(self, group, frozenset(topics), listener or Listener())
        home.members.append(member)
        await self._rebalance(home)
        return member

    async def read(self, start: Mapping[TopicPartition, int]) -> Reader:
        """Read partitions from these offsets on; an offset that is not in the log raises OffsetLost."""
        for partition, offset in start.items():
            self._topic(partition.topic)
            self.require(partition, offset)
        return MemoryReader(self, start)

    async def begin_offsets(self, topic: str) -> dict[int, int]:
        """Return partition -> first offset still in the log."""
        return {part.partition: self._log[part].begin for part in self._partitions(topic)}

    async def end_offsets(self, topic: str) -> dict[int, int]:
        """Return partition -> next offset to be written."""
        return {part.partition: self._log[part].end for part in self._partitions(topic)}

    async def commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Store the progress of a group that nobody has joined."""
        await asyncio.sleep(0)
        if self._groups.setdefault(group, _Group()).members:
            raise NotOwner(f"group {group} has members: only they may commit")
        for partition in offsets:
            self._topic(partition.topic)
        self.store(group, offsets)

    async def offsets_since(self, topic: str, since_ms: int) -> dict[int, int]:
        """Return partition -> first offset whose timestamp is not before since_ms; the end where none is."""
        return {
            part.partition: next(
                (record.offset for record in self._log[part].records if record and record.timestamp_ms >= since_ms),
                self._log[part].end,
            )
            for part in self._partitions(topic)
        }

    async def committed(self, group: str, topic: str) -> dict[int, Committed]:
        """Return partition -> progress of a group, for partitions that have any."""
        known = self._groups[group].committed if group in self._groups else {}
        return {part.partition: known[part] for part in self._partitions(topic) if part in known}

    async def create_topics(self, topics: Iterable[Topic[Any]]) -> list[str]:
        """Create the topics that are missing and return their names."""
        missing = [topic for topic in topics if topic.name not in self._topics]
        for topic in missing:
            self._topics[topic.name] = topic
            self._turn[topic.name] = itertools.count()
            for number in range(topic.partitions):
                self._log[TopicPartition(topic.name, number)] = _Partition()
        return [topic.name for topic in missing]

    async def check_topics(self, topics: Iterable[Topic[Any]]) -> None:
        """Raise ConfigError listing every topic that is missing or differs from the table."""
        found = {name: topic_shape.shape_of(topic) for name, topic in self._topics.items()}
        topic_shape.require(topics, found, prefix="", where="the memory bus")

    def trim(self, partition: TopicPartition, before: int) -> None:
        """Remove the records before an offset, as retention does."""
        log = self._log[partition]
        del log.records[: before - log.begin]
        log.begin = before

    def mark(self, partition: TopicPartition) -> None:
        """Write an offset that is no record, as the end of a foreign producer's transaction does."""
        self._log[partition].records.append(None)
        self._tell(partition.topic)

    async def expel(self, consumer: Consumer) -> None:
        """Take a member's partitions away without telling it, as when its session runs out."""
        for home in self._groups.values():
            for member in home.members:
                if member is consumer:
                    home.members.remove(member)
                    member.forget()
                    await self._rebalance(home)
                    return

    # What members and readers ask for.

    def require(self, partition: TopicPartition, offset: int) -> None:
        """Raise OffsetLost if reading cannot continue at this offset."""
        log = self._log[partition]
        if not log.holds(offset):
            raise OffsetLost(
                f"offset {offset} of {partition.topic}, partition {partition.partition}, is not in the log, which "
                f"holds {log.begin} to {log.end} (retention.ms={self._topics[partition.topic].retention_ms}); "
                "records were removed before they were read"
            )

    def take(
        self, position: dict[TopicPartition, int], max_records: int, without: Collection[TopicPartition] = ()
    ) -> list[Record]:
        """Return records from these positions on and move the positions; a part of each partition, in turn."""
        taken: list[Record] = []
        for partition in [part for part in position if part not in without]:
            if len(taken) >= max_records:
                break
            offset = position.pop(partition)
            position[partition] = offset  # to the end of the queue: no partition waits for ever behind a full one
            self.require(partition, offset)
            found, position[partition] = self._log[partition].after(offset, max_records - len(taken))
            taken += found
        return taken

    def listen(self, topics: Iterable[str]) -> asyncio.Event:
        """Return an event that the next record on these topics sets; whoever hears it clears it before it looks."""
        event = asyncio.Event()
        for topic in topics:
            self._waiting[topic].append(event)
        return event

    def deafen(self, event: asyncio.Event) -> None:
        """Forget somebody who listened, and wake him for the last time."""
        for events in self._waiting.values():
            if event in events:
                events.remove(event)
        event.set()

    def _tell(self, topic: str) -> None:
        for event in self._waiting[topic]:
            event.set()

    def starting_points(self, group: str, owned: Iterable[TopicPartition]) -> dict[TopicPartition, Committed]:
        """Return where a group goes on: at what it committed, else at the earliest record."""
        committed = self._groups[group].committed
        return {part: committed.get(part) or Committed(self._log[part].begin) for part in sorted(owned)}

    def store(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Keep a group's progress."""
        for partition, progress in offsets.items():
            if len(progress.metadata.encode()) > METADATA_BYTES:
                raise BusError(f"committing {partition}: metadata of more than {METADATA_BYTES} bytes")
        self._groups[group].committed.update(offsets)

    async def leave(self, member: MemoryMember) -> None:
        """Take a member out of its group."""
        home = self._groups[member.group]
        if member in home.members:
            home.members.remove(member)
            await self._rebalance(home)

    async def _rebalance(self, home: _Group) -> None:
        async with home.rebalancing:
            members = list(home.members)
            for member in members:
                await member.pause()
            wanted = {part for member in members for topic in member.topics for part in self._partitions(topic)}
            shares = share(sorted(wanted), [(member.topics, member.assignment()) for member in members])
            # All lose before anyone gains: a partition has one owner at a time.
            for member, owned in zip(members, shares, strict=True):
                await member.lose(member.assignment() - owned)
            for member, owned in zip(members, shares, strict=True):
                await member.gain(owned)

    def _topic(self, name: str) -> Topic[Any]:
        if name not in self._topics:
            raise BusError(f"no topic {name} on the memory bus; create the topics first")
        return self._topics[name]

    def _partitions(self, topic: str) -> list[TopicPartition]:
        return [TopicPartition(topic, number) for number in range(self._topic(topic).partitions)]


class MemoryMember:
    """One member of a consumer group (`infra.bus.Consumer`)."""

    def __init__(
        self,
        bus: MemoryBus,
        group: str,
        topics: frozenset[str],
        listener: Listener,
    ) -> None:
        self.group = group
        self.topics = topics
        self._bus = bus
        self._listener = listener
        self._owned: frozenset[TopicPartition] = frozenset()
        self._position: dict[TopicPartition, int] = {}
        self._ready = False
        self._joining = False
        self._moves = 0
        """Counts the rebalances and seeks that this member went through."""
        self._broken: Exception | None = None
        self._news = bus.listen(topics)

    async def poll(
        self, max_records: int, timeout_s: float, *, without: Collection[TopicPartition] = ()
    ) -> list[Record]:
        """Return up to max_records records, or none after timeout_s; see `infra.bus.Consumer`."""
        give_up = self._bus.clock.monotonic() + timeout_s
        while True:
            self._news.clear()
            if self._broken is not None:
                raise self._broken
            if self._ready and max_records > 0 and (found := self._bus.take(self._position, max_records, without)):
                moves = self._moves
                await asyncio.sleep(0)
                if moves == self._moves:
                    return found
                continue  # a rebalance moved the positions meanwhile: what they bring now is right
            left_s = give_up - self._bus.clock.monotonic()
            if left_s <= 0:
                await asyncio.sleep(0)
                return []
            await wait_for(self._news, self._bus.clock, left_s)

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions this member owns now."""
        return self._owned

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Store the group's progress. Raises NotOwner or BusError."""
        await asyncio.sleep(0)
        foreign = sorted(offsets.keys() - self._owned)
        if foreign:
            raise NotOwner(f"group {self.group}: {foreign} belong to another member now")
        if self._joining:
            raise NotOwner(f"group {self.group}: a rebalance is under way, its end is not known yet")
        self._bus.store(self.group, offsets)

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue an owned partition at this offset."""
        if partition not in self._owned:
            raise NotOwner(f"group {self.group}: cannot seek in {partition}, it belongs to another member")
        self._moves += 1
        self._position[partition] = offset

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset that will be handed out; see `infra.bus.Consumer`."""
        if partition not in self._position:
            raise NotOwner(f"group {self.group}: {partition} has no position here, it belongs to another member")
        return self._position[partition]

    async def close(self) -> None:
        """Leave the group; no callback is called."""
        self.forget()
        self._bus.deafen(self._news)
        await self._bus.leave(self)

    # What a rebalance does to a member.

    async def pause(self) -> None:
        """Hand out nothing more until the assignment is known; what is owned may still be committed."""
        self._ready = False
        self._moves += 1
        if self._owned:
            await self._guarded(self._listener.on_rebalance())
        self._joining = True

    async def lose(self, lost: frozenset[TopicPartition]) -> None:
        """Give partitions up."""
        self._owned -= lost
        if lost:
            await self._guarded(self._listener.on_revoked(lost))

    async def gain(self, owned: frozenset[TopicPartition]) -> None:
        """Own partitions, from the committed offset on unless the listener says otherwise."""
        self._owned = owned
        starts = self._bus.starting_points(self.group, owned)
        self._position = {part: progress.offset for part, progress in starts.items()}
        elsewhere = await self._guarded(self._listener.on_assigned(starts))
        self._position |= elsewhere or {}
        self._ready, self._joining = True, False
        self._news.set()

    def forget(self) -> None:
        """Own nothing more."""
        self._owned, self._position, self._ready = frozenset(), {}, False

    async def _guarded(self, told: Awaitable[T]) -> T | None:
        try:
            return await told
        except Exception as error:  # noqa: BLE001 - it is this member's error, not that of who joined; poll raises it
            self._broken = error
            return None


class MemoryReader:
    """Reads whole partitions from given offsets, in no group (`infra.bus.Reader`)."""

    def __init__(self, bus: MemoryBus, start: Mapping[TopicPartition, int]) -> None:
        self._bus = bus
        self._position = dict(start)
        self._news = bus.listen({partition.topic for partition in start})

    async def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        """Return up to max_records records, or none after timeout_s; in offset order per partition."""
        give_up = self._bus.clock.monotonic() + timeout_s
        while True:
            self._news.clear()
            found = self._bus.take(self._position, max_records)
            left_s = give_up - self._bus.clock.monotonic()
            if found or left_s <= 0:
                await asyncio.sleep(0)
                return found
            await wait_for(self._news, self._bus.clock, left_s)

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset that will be handed out."""
        return self._position[partition]

    async def close(self) -> None:
        """Stop reading."""
        self._position = {}
        self._bus.deafen(self._news)


def share(
    partitions: Sequence[TopicPartition],
    members: Sequence[tuple[frozenset[str], frozenset[TopicPartition]]],
) -> list[frozenset[TopicPartition]]:
    """Spread partitions over members, each keeping what it has as far as the balance allows.

    Args:
        partitions: all partitions to hand out.
        members: per member the topics it reads and the partitions it has.
    """
    shares: list[set[TopicPartition]] = [set() for _ in members]
    fair, one_more = divmod(len(partitions), len(members)) if members else (0, 0)
    homeless = []
    for partition in partitions:
        keeper = next((at for at, (_, has) in enumerate(members) if partition in has), None)
        if keeper is not None and len(shares[keeper]) < fair + (one_more > 0):
            shares[keeper].add(partition)
            one_more -= len(shares[keeper]) > fair
        else:
            homeless.append(partition)
    for partition in homeless:
        readers = [at for at, (topics, _) in enumerate(members) if partition.topic in topics]
        shares[min(readers, key=lambda at: len(shares[at]))].add(partition)
    return [frozenset(owned) for owned in shares]
