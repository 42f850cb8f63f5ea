"""The log on Apache Kafka, by aiokafka.

Holds what `bus.py` promises; `kafka_consumer.py` reads, `kafka_progress.py` commits for groups without members,
`kafka_topics.py` makes topics, `kafka_link.py` knows names and limits. Publishing is idempotent with acks=all, and
every record is awaited with a limit of ours, since the client retries for ever. A refused or lost record leaves a hole
in the client's sequence numbers, which would fail all that follows: the producer is then replaced, and a record that
only suffered from the hole is sent once more. So a record may lie in the log twice, never not at all after `publish`
has returned; which one counts is settled by the readers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    DuplicateSequenceNumber,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    KafkaError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    ProducerClosed,
    ProducerFenced,
    UnknownProducerId,
)

from infra import kafka_topics
from infra.blobs import BlobStore
from infra.bus import Committed, Consumer, Headers, Listener, Position, Reader, TopicPartition
from infra.errors import BusError
from infra.kafka_consumer import GroupMember, PartitionReader
from infra.kafka_link import PUBLISH_ADVICE, KafkaLimits, KafkaLink
from infra.kafka_progress import ProgressKeeper
from infra.security import PLAINTEXT, Security
from infra.shared_timer import SharedTimer
from infra.topic_shape import ANY_COPIES, Durability
from schemas.topics import DEFAULT_PREFIX, Topic

log = logging.getLogger(__name__)

__all__ = ["KafkaBus", "KafkaLimits"]

_BATCH_BYTES = 65_536
"""Records of one partition are sent together up to this size."""

_SEQUENCE_ERRORS = (
    DuplicateSequenceNumber,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    OutOfOrderSequenceNumber,
    ProducerClosed,
    ProducerFenced,
    UnknownProducerId,
)
"""Errors of a producer, not of a record: the same record goes through with a new producer."""


class KafkaBus:
    """One connection to a Kafka cluster, under one prefix (`infra.bus.Bus`)."""

    def __init__(
        self,
        bootstrap: str,
        *,
        prefix: str = DEFAULT_PREFIX,
        client_id: str = "rollmill",
        limits: KafkaLimits | None = None,
        blobs: BlobStore | None = None,
        security: Security = PLAINTEXT,
        durability: Durability = ANY_COPIES,
    ) -> None:
        """Name a cluster; nothing is connected yet.

        Args:
            bootstrap: addresses, `host:port,host:port`.
            prefix: put before every topic and group name.
            client_id: name of this program in the brokers' logs.
            limits: bounds of every wait.
            blobs: where values too large for a record lie; without it they are refused.
            security: how both sides prove themselves.
            durability: copies that topics are made with, and must have.
        """
        self.blobs = blobs
        self._limits = limits or KafkaLimits()
        self._link = KafkaLink(bootstrap, prefix=prefix, client_id=client_id, limits=self._limits, security=security)
        self._progress = ProgressKeeper(self._link)
        self._started = False
        self._durability = durability
        self._producer: AIOKafkaProducer | None = None
        self._replacing = asyncio.Lock()
        self._timer = SharedTimer()
        self._retired: set[asyncio.Task[None]] = set()
        self._turn: dict[str, int] = {}

    async def start(self) -> None:
        """Connect. Raises BusError that says what to check when nothing answers in time or we are refused."""
        try:
            await self._link.reach()
            await self._link.start()
        except BaseException:
            await self.close()
            raise
        self._started = True

    async def close(self) -> None:
        """Flush what was accepted and disconnect."""
        self._started = False
        async with self._replacing:  # a producer that is just being made would be nobody's
            if self._producer is not None:
                await self._retire(self._producer)
                self._producer = None
        await asyncio.gather(*self._retired)
        await self._progress.close()
        await self._link.close()

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> Position:
        """Append a record and return once it is durable; no partition means: spread evenly."""
        if value is None and key is None:
            raise BusError(f"publishing to {topic}: a record needs a key or a value")
        try:
            # Not `guarded`: thousands of records a second would each set and cancel a timer of the loop.
            with self._timer.limit(self._limits.outage_s):
                place = await self._place(topic, partition)
                record = {"value": value, "key": key, "partition": place, "headers": list(headers)}
                try:
                    return await self._send(topic, record)
                except _SEQUENCE_ERRORS as error:
                    log.warning("publishing to %s: sent again by a new producer after %r", topic, error)
                    return await self._send(topic, record)
        except (TimeoutError, KafkaError) as error:
            doing = f"publishing to {self._link.prefix}{topic}"
            raise self._link.failure(error, self._limits.outage_s, doing, PUBLISH_ADVICE) from error

    async def _place(self, topic: str, partition: int | None) -> int:
        count = await self._link.partitions(topic)
        if partition is None:
            # Not by key: siblings share a key and must spread. Many producers, so each starts anywhere.
            turn = self._turn.get(topic)
            self._turn[topic] = turn = random.randrange(count) if turn is None else turn + 1
            return turn % count
        if not 0 <= partition < count:
            raise BusError(f"publishing to {topic}: no partition {partition}, it has {count}")
        return partition

    async def _send(self, topic: str, record: Mapping[str, Any]) -> Position:
        producer = await self._ready_producer()
        try:
            # Who is cancelled here does not unsend the record: the client goes on with the batch that it lies in.
            placed = await (await producer.send(self._link.prefix + topic, **record))
            if placed.offset < 0:
                # Known twice to the broker, which no longer knows where: callers live by the offset.
                raise DuplicateSequenceNumber
        except MessageSizeTooLargeError as error:
            raise BusError(f"publishing to {topic}: {error}") from error
        except KafkaError:
            await self._replace(producer)
            raise
        return Position(placed.partition, placed.offset)

    async def _ready_producer(self) -> AIOKafkaProducer:
        """Return the producer, made at the first record: who only reads may not be allowed to have one."""
        self._require_start()
        if self._producer is not None and not self._replacing.locked():
            return self._producer
        async with self._replacing:
            self._require_start()  # it may have been closed meanwhile
            if self._producer is None:
                self._producer = await self._make_producer()
            return self._producer

    def _require_start(self) -> None:
        if not self._started:
            raise BusError("the bus is not started, or closed: call start() first")

    async def _make_producer(self) -> AIOKafkaProducer:
        await self._link.reach()
        producer = AIOKafkaProducer(
            **self._link.options(),
            acks="all",
            enable_idempotence=True,
            linger_ms=self._limits.linger_ms,
            max_batch_size=_BATCH_BYTES,
            max_request_size=self._limits.record_bytes,
        )
        try:
            await producer.start()
        except BaseException:
            await producer.stop()
            raise
        return producer

    async def _replace(self, broken: AIOKafkaProducer) -> None:
        async with self._replacing:
            if self._producer is not broken:
                return  # another record met the same producer's end
            self._producer = await self._make_producer()
            retiring = asyncio.create_task(self._retire(broken))
            self._retired.add(retiring)
            retiring.add_done_callback(self._retired.discard)

    async def _retire(self, producer: AIOKafkaProducer) -> None:
        """Let a producer finish what it accepted; fail what it cannot finish in time."""
        stopping = asyncio.ensure_future(producer.stop())
        await asyncio.wait({stopping}, timeout=self._limits.close_s)
        if not stopping.done():
            log.warning("records were not acknowledged in %g s and are given up", self._limits.close_s)
            # Its `stop` waits for these records without a limit, and offers no other way out: first nobody sends
            # them any more, then they fail.
            await producer._sender.close()  # noqa: SLF001
            producer._message_accumulator.fail_all(ProducerClosed())  # noqa: SLF001
        await stopping

    async def join(self, topics: Sequence[str], group: str, listener: Listener | None = None) -> Consumer:
        """Join a consumer group; returns with the first assignment."""
        for topic in topics:
            await self._link.partitions(topic)
        await self._link.reach()
        member = GroupMember(self._link, group, listener or Listener())
        await member.start(list(topics))
        return member

    async def read(self, start: Mapping[TopicPartition, int]) -> Reader:
        """Read partitions from these offsets on; an offset that is not in the log raises OffsetLost."""
        await self._link.reach()
        reader = PartitionReader(self._link, start)
        await reader.start()
        return reader

    async def begin_offsets(self, topic: str) -> dict[int, int]:
        """Return partition -> first offset still in the log."""
        return await self._link.begin_offsets(topic)

    async def end_offsets(self, topic: str) -> dict[int, int]:
        """Return partition -> next offset to be written."""
        return await self._link.end_offsets(topic)

    async def commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Store the progress of a group that nobody has joined."""
        for topic in sorted({partition.topic for partition in offsets}):
            await self._link.partitions(topic)
        await self._progress.commit(group, offsets)

    async def offsets_since(self, topic: str, since_ms: int) -> dict[int, int]:
        """Return partition -> first offset whose timestamp is not before since_ms; the end where none is."""
        return await self._link.offsets_since(topic, since_ms)

    async def committed(self, group: str, topic: str) -> dict[int, Committed]:
        """Return partition -> progress of a group, for partitions that have any."""
        found = await self._link.committed(group, [topic])
        return {partition.partition: progress for partition, progress in sorted(found.items())}

    async def create_topics(self, topics: Iterable[Topic[Any]]) -> list[str]:
        """Create the topics that are missing and return their names."""
        return await kafka_topics.create(self._link, topics, self._durability)

    async def check_topics(self, topics: Iterable[Topic[Any]]) -> None:
        """Raise ConfigError listing every topic that is missing or differs from the table."""
        await kafka_topics.check(self._link, topics, self._durability)
