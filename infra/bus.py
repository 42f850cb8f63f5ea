"""The log as a protocol: what every broker implementation must do, and nothing more.

Implementations: `kafka.py` (aiokafka, Apache Kafka) and `memory.py` (the twin); `tests/contract/test_bus*.py` hold
both to this page. Promises:

- `publish` returns after the record is durable (acks=all, idempotent) or raises BusError within `limits`;
- within a group, a partition belongs to one member at a time; `poll` hands out its records in offset order, starting
  at the committed offset, or at the earliest one for a new group; an offset out of range raises OffsetLost;
- records of a partition are handed out only after `on_assigned` for it has returned;
- after a rebalance every partition goes on at the committed offset, those that the member kept too, unless its
  `on_assigned` says where else: whose work goes on need not be handed out again;
- what a poll fetched before a rebalance or a seek is not handed out after it: the order within a partition holds;
- `on_rebalance` is called when a rebalance begins, while what the member owns may still be committed; from its end to
  that of `on_assigned` a commit raises NotOwner and reaches nobody;
- `commit` of a partition that the member no longer owns raises NotOwner and changes nothing;
- a reader (`read`) belongs to no group and sees one or more whole partitions from given offsets.

This file does not know messages: keys, values and headers are bytes; `wire.py` makes them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from schemas.topics import Topic

if TYPE_CHECKING:  # named below and not used: who has no store need not know what one is
    from infra.blobs import BlobStore

Headers = tuple[tuple[str, bytes], ...]


class TopicPartition(NamedTuple):
    """One partition of one topic; the name is without the prefix."""

    topic: str
    partition: int


class Record(msgspec.Struct, frozen=True):
    """One record as it lies in the log.

    A Struct like everything that is made for each record: a frozen dataclass takes ten times as long to make.
    """

    topic: str
    """Name without the prefix."""
    partition: int
    offset: int
    timestamp_ms: int
    """When it was published, milliseconds since the epoch."""
    key: bytes | None
    value: bytes | None
    """None removes the key from a compacted topic."""
    headers: Headers = ()

    @property
    def tp(self) -> TopicPartition:
        """The partition this record lies in."""
        return TopicPartition(self.topic, self.partition)

    def header(self, name: str) -> bytes | None:
        """Return a header; the last one where there are several of its name."""
        found = None
        for named, value in self.headers:
            if named == name:
                found = value
        return found


@dataclass(frozen=True, slots=True)
class Committed:
    """A group's progress on one partition."""

    offset: int
    """Next offset to hand out."""
    metadata: str = ""
    """Text kept with the offset, at most 4096 bytes (Kafka's `offset.metadata.max.bytes`)."""


class Position(NamedTuple):
    """Where a published record lies."""

    partition: int
    offset: int


async def _nothing(*_: object) -> None:
    pass


async def _from_committed(_: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """What a member of a group is told. Each call must return quickly and take no lock that polling code holds."""

    on_rebalance: Callable[[], Awaitable[None]] = _nothing
    """A rebalance begins: the last moment to commit what may be lost."""
    on_revoked: Callable[[frozenset[TopicPartition]], Awaitable[None]] = _nothing
    """These did not come back; another member may own them already."""
    on_assigned: Callable[[Mapping[TopicPartition, Committed]], Awaitable[Mapping[TopicPartition, int]]] = (
        _from_committed
    )
    """What is owned now, with the group's progress (a partition without any starts at its earliest offset). Returns
    where to go on instead, for partitions that need not go back to the committed offset. Comes after `on_revoked`."""


class Consumer(Protocol):
    """One member of a consumer group."""

    async def poll(
        self, max_records: int, timeout_s: float, *, without: Collection[TopicPartition] = ()
    ) -> list[Record]:
        """Return up to max_records records, or none after timeout_s; never more than asked.

        Keeps the membership alive: call it regularly, also with max_records = 0 when busy (then it only waits for
        timeout_s, and fetches nothing). Nothing is handed out of the partitions in `without`, and what was fetched of
        them already is kept.
        """
        ...

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions this member owns now."""
        ...

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Store the group's progress. Raises NotOwner or BusError."""
        ...

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue an owned partition at this offset."""
        ...

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset that will be handed out, as far as the last poll saw.

        A poll that brought nothing has seen the gaps at the end (markers of transactions); they count as passed. Raises
        NotOwner where the partition is another member's, or a rebalance has not told yet where to go on.
        """
        ...

    async def close(self) -> None:
        """Leave the group."""
        ...


class Reader(Protocol):
    """Reads whole partitions from given offsets, in no group."""

    async def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        """Return up to max_records records, or none after timeout_s; in offset order per partition."""
        ...

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset that will be handed out (gaps in the log count as passed)."""
        ...

    async def close(self) -> None:
        """Stop reading."""
        ...


class Bus(Protocol):
    """The log."""

    @property
    def blobs(self) -> BlobStore | None:
        """Where values lie that are too large for a record (`claims.py`); None: they are refused.

        A plain attribute of each implementation: it is asked for with every record.
        """
        ...

    async def start(self) -> None:
        """Connect. Raises BusError naming the address when nothing answers in time."""
        ...

    async def close(self) -> None:
        """Flush what was accepted and disconnect."""
        ...

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> Position:
        """Append a record and return once it is durable; no partition means: spread evenly.

        Raises:
            BusError: not acknowledged in time, or refused (unknown topic, too large).
        """
        ...

    async def join(self, topics: Sequence[str], group: str, listener: Listener | None = None) -> Consumer:
        """Join a consumer group; returns with the first assignment."""
        ...

    async def read(self, start: Mapping[TopicPartition, int]) -> Reader:
        """Read partitions from these offsets on; an offset before the first one in the log raises OffsetLost."""
        ...

    async def begin_offsets(self, topic: str) -> dict[int, int]:
        """Return partition -> first offset still in the log."""
        ...

    async def end_offsets(self, topic: str) -> dict[int, int]:
        """Return partition -> next offset to be written."""
        ...

    async def commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Store the progress of a group that nobody has joined; raises NotOwner while it has members, or BusError.

        For whoever reads by `read` and wants its progress kept and its lag shown: it protects from no other reader.
        """
        ...

    async def offsets_since(self, topic: str, since_ms: int) -> dict[int, int]:
        """Return partition -> first offset whose timestamp is not before since_ms; the end where none is."""
        ...

    async def committed(self, group: str, topic: str) -> dict[int, Committed]:
        """Return partition -> progress of a group, for partitions that have any."""
        ...

    async def create_topics(self, topics: Iterable[Topic[Any]]) -> list[str]:
        """Create the topics that are missing and return their names."""
        ...

    async def check_topics(self, topics: Iterable[Topic[Any]]) -> None:
        """Raise ConfigError listing every topic that is missing or differs from the table."""
        ...
