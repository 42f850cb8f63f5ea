"""What the log in memory holds: topics, their records by offset, and who waits for the next one.

Invariants: an offset is given once and never again; what `trim` removed and what another's transaction marked are no
records, but their offsets stay. `trim` plays the retention, `mark` the end of a transaction, `rewrite` a failing disk;
`copy` gives two logs one past. Knows no consumer group and no codec. One event loop, one process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from infra.bus import Headers, Record, TopicPartition
from infra.errors import BusError, OffsetLost
from schemas.topics import Topic


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


class MemoryLog:
    """The topics of a `MemoryBus`."""

    def __init__(self) -> None:
        self.topics: dict[str, Topic[Any]] = {}
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._turn: dict[str, itertools.count[int]] = {}
        self._waiting: defaultdict[str, list[asyncio.Event]] = defaultdict(list)
        """Topic -> who wants to hear of its next record, in an order that does not depend on addresses."""

    def create(self, topic: Topic[Any]) -> None:
        """Begin an empty topic; one that is there must not be created again."""
        self.topics[topic.name] = topic
        self._turn[topic.name] = itertools.count()
        self._partitions |= {part: _Partition() for part in self.partitions(topic.name)}

    def topic(self, name: str) -> Topic[Any]:
        """Return a topic; BusError if there is none of this name."""
        if name not in self.topics:
            raise BusError(f"no topic {name} on the memory bus; create the topics first")
        return self.topics[name]

    def partitions(self, topic: str) -> list[TopicPartition]:
        """Return the partitions of a topic, in order."""
        return [TopicPartition(topic, number) for number in range(self.topic(topic).partitions)]

    def begin(self, partition: TopicPartition) -> int:
        """Return the first offset that is kept."""
        return self._partitions[partition].begin

    def end(self, partition: TopicPartition) -> int:
        """Return the next offset to be written."""
        return self._partitions[partition].end

    def since(self, partition: TopicPartition, since_ms: int) -> int:
        """Return the first offset whose timestamp is not before since_ms; the end where there is none."""
        held = self._partitions[partition]
        late = (record.offset for record in held.records if record and record.timestamp_ms >= since_ms)
        return next(late, held.end)

    def next_in_turn(self, topic: str) -> int:
        """Return the number of the partition that gets the next record that asks for none."""
        return next(self._turn[topic]) % self.topic(topic).partitions

    def append(self, record: Record) -> None:
        """Write a record at the end of its partition, whose offset it must have, and wake who waits for it."""
        self._partitions[record.tp].records.append(record)
        self.tell(record.topic)

    def require(self, partition: TopicPartition, offset: int) -> None:
        """Raise OffsetLost if reading cannot continue at this offset."""
        held = self._partitions[partition]
        if not held.holds(offset):
            raise OffsetLost(
                f"offset {offset} of {partition.topic}, partition {partition.partition}, is not in the log, which "
                f"holds {held.begin} to {held.end} (retention.ms={self.topics[partition.topic].retention_ms}); "
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
            found, position[partition] = self._partitions[partition].after(offset, max_records - len(taken))
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

    def tell(self, topic: str) -> None:
        """Wake whoever waits for news of a topic."""
        for event in self._waiting[topic]:
            event.set()

    # What tests do to it.

    def trim(self, partition: TopicPartition, before: int) -> None:
        """Remove the records before an offset, as retention does."""
        held = self._partitions[partition]
        del held.records[: before - held.begin]
        held.begin = before

    def mark(self, partition: TopicPartition) -> None:
        """Write an offset that is no record, as the end of a foreign producer's transaction does."""
        self._partitions[partition].records.append(None)
        self.tell(partition.topic)

    def copy(self, other: MemoryLog, topic: str) -> None:
        """Hold what another log holds of a topic."""
        for partition in self.partitions(topic):
            source = other._partitions[partition]
            self._partitions[partition] = _Partition(source.begin, list(source.records))
        self.tell(topic)

    def rewrite(self, partition: TopicPartition, offset: int, change: Callable[[bytes], bytes]) -> None:
        """Replace a record's value by what `change` makes of it, as a disk that fails does."""
        record = self._record(partition, offset)
        if record.value is None:
            raise BusError(f"rewriting {partition}: there is no value at offset {offset}")
        self._replace(msgspec.structs.replace(record, value=change(record.value)))

    def rewrite_headers(self, partition: TopicPartition, offset: int, change: Callable[[Headers], Headers]) -> None:
        """Do the same with its headers."""
        record = self._record(partition, offset)
        self._replace(msgspec.structs.replace(record, headers=change(record.headers)))

    def _record(self, partition: TopicPartition, offset: int) -> Record:
        held = self._partitions[partition]
        record = held.records[offset - held.begin] if held.begin <= offset < held.end else None
        if record is None:
            raise BusError(f"rewriting {partition}: there is no record at offset {offset}")
        return record

    def _replace(self, record: Record) -> None:
        held = self._partitions[record.tp]
        held.records[record.offset - held.begin] = record
