"""The one service that writes ClickHouse: every record of the stored topics becomes rows, exactly once.

Per partition it buffers rows, closes a range of offsets, writes the range into the group's commit metadata, inserts
under a token made of the range, and commits the end of it (`ranges.py`). Killed at any point, its successor inserts
the same range again and ClickHouse keeps one copy. A member that lost its partition is stopped by the first commit,
or inserts what its successor inserts under the same token.

Polling goes on while an insert runs or ClickHouse is away, so the group does not rebalance; a full buffer stops the
intake, not the polling. The lag of group GROUP is then what shows it. Nothing is dropped: what cannot be read goes to
`dead` at once and the rest of the stream goes on; a terminal record of another task than the one that has its id is
stored, and told of in `dead` as well (`conflicts.py`). This file does not know what the rows mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from clickhouse_connect.datatypes.registry import get_from_name
from clickhouse_connect.driver.asyncclient import AsyncClient
from clickhouse_connect.driver.insert import InsertContext

from infra.bus import Bus, Committed, Consumer, Listener, Record, TopicPartition
from infra.claims import carried_bytes
from infra.clickhouse import schema
from infra.clickhouse.client import FAILURES, Address, StoreError, connect, explained
from infra.clickhouse.conflicts import ConflictLetters
from infra.clickhouse.ranges import PartitionBuffer, Range, Want
from infra.clickhouse.rows import TABLES, Row, RowError, Rows
from infra.clickhouse.streams import STREAMS, Stream
from infra.clock import Clock, wait_for
from infra.dead_letter import NOT_STORED, POISON, Death, bury
from infra.errors import BusError, NotOwner
from infra.side_by_side import together
from schemas.codec import DecodeError

log = logging.getLogger(__name__)

GROUP = "sink"
"""The consumer group; part of every deduplication token, so a second group would store everything again."""

MAX_RANGE_ROWS = 50_000
"""Rows that close a range at once."""

MAX_RANGE_BYTES = 16 * 1024 * 1024
"""Bytes of records that close a range at once."""

MAX_BUFFER_BYTES = 256 * 1024 * 1024
"""Bytes of records held in memory, over all partitions; beyond it nothing more is taken in."""

POLL_RECORDS = 500
"""Most records of one poll."""

POLL_S = 0.2
"""Longest wait of one poll, and with it how late a range may close."""

INSERTS_AT_ONCE = 4
"""Ranges inserted side by side."""

RETRY_FIRST_S = 0.5
"""Pause after the first failed insert; it doubles with each further one."""

RETRY_MAX_S = 30.0
"""Longest pause between two tries."""

STOP_S = 10.0
"""How long a stop waits for what is buffered to be stored; the rest is read again by the next start."""

_COLUMNS = {table.name: table for table in TABLES}


@dataclass
class Progress:
    """What a sink has done since its start, for its log and for tests."""

    records: int = 0
    """Records taken in."""
    rows: int = 0
    """Rows stored."""
    ranges: int = 0
    """Ranges stored and committed."""
    buried: int = 0
    """Records that went to `dead`."""
    failing_since: float | None = None
    """Clock.monotonic() of the first failure in a row; None while ClickHouse answers."""
    last_error: str = ""
    """What ClickHouse said at the last failure."""
    stored_to: dict[TopicPartition, int] = field(default_factory=dict)
    """Partition -> rows of all offsets below are stored."""


class Sink:
    """One member of the sink's group."""

    def __init__(
        self,
        bus: Bus,
        address: Address,
        clock: Clock,
        *,
        group: str = GROUP,
        streams: Sequence[Stream] = STREAMS,
        max_range_rows: int = MAX_RANGE_ROWS,
    ) -> None:
        self._bus = bus
        self._address = address
        self._clock = clock
        self._group = group
        self._streams = {stream.topic.name: stream for stream in streams}
        self._max_range_rows = max_range_rows
        self._buffers: dict[TopicPartition, PartitionBuffer] = {}
        self._conflicts = ConflictLetters(bus, clock, GROUP)
        self._client: AsyncClient | None = None
        self._stopping = asyncio.Event()
        self.progress = Progress()

    def stop(self) -> None:
        """Make `run` store what is buffered and return."""
        self._stopping.set()

    async def run(self) -> None:
        """Store until `stop` or cancellation.

        Raises:
            ConfigError: ClickHouse holds a newer schema.
            StoreError: ClickHouse refuses for a reason that waiting does not mend.
            BusError: the log is away, or no longer holds what was not stored yet (OffsetLost).
        """
        consumer: Consumer | None = None
        flush: asyncio.Task[None] | None = None
        try:
            if not await self._patiently(self._open):
                return
            listener = Listener(on_assigned=self._assigned, on_revoked=self._revoked)
            consumer = await self._bus.join(list(self._streams), self._group, listener)
            while not self._stopping.is_set():
                flush = await self._round(consumer, flush)
            await self._drain(consumer, flush)
        finally:
            if flush is not None:
                flush.cancel()
                await asyncio.wait([flush])
            if consumer is not None:
                await consumer.close()
            if self._client is not None:
                await self._client.close()

    async def _round(self, consumer: Consumer, flush: asyncio.Task[None] | None) -> asyncio.Task[None] | None:
        """Poll once, take what came, and start a flush if one is due and none runs."""
        for record in await consumer.poll(self._room(), POLL_S):
            await self._take(consumer, record)
        if flush is not None:
            if not flush.done():
                return flush
            flush.result()
        ranges = self._due()
        return asyncio.create_task(self._flush(consumer, ranges)) if ranges else None

    async def _drain(self, consumer: Consumer, flush: asyncio.Task[None] | None) -> None:
        """Store what is buffered, within STOP_S; polling keeps the partitions meanwhile."""
        last = asyncio.create_task(self._flush_rest(consumer, flush))
        give_up_at = self._clock.monotonic() + STOP_S
        while not last.done() and self._clock.monotonic() < give_up_at:
            await consumer.poll(0, POLL_S)
        if not last.done():
            log.warning("stopping with rows not stored after %g s; the next start reads them again", STOP_S)
            last.cancel()
        await asyncio.wait([last])
        if not last.cancelled():
            last.result()

    async def _flush_rest(self, consumer: Consumer, flush: asyncio.Task[None] | None) -> None:
        if flush is not None:
            await flush
        # Twice: a partition may hold an intended range and rows after it.
        for _ in range(2):
            if ranges := self._due(draining=True):
                await self._flush(consumer, ranges)

    def _room(self) -> int:
        return POLL_RECORDS if sum(buffer.bytes for buffer in self._buffers.values()) < MAX_BUFFER_BYTES else 0

    def _due(self, *, draining: bool = False) -> list[Range]:
        now = self._clock.monotonic()
        found = (
            buffer.due(now, max_rows=self._max_range_rows, max_bytes=MAX_RANGE_BYTES, draining=draining)
            for buffer in self._buffers.values()
        )
        return [due for due in found if due is not None]

    async def _take(self, consumer: Consumer, record: Record) -> None:
        buffer = self._buffers.get(record.tp)
        want = buffer.wants(record.offset) if buffer is not None else Want.SKIP
        if buffer is None or want is Want.SKIP:
            return
        if want is Want.REWIND:
            with suppress(NotOwner):
                await consumer.seek(record.tp, buffer.next_offset)
            return
        rows = await self._read(record)
        size = carried_bytes(record) + len(record.key or b"")
        buffer.add(record.offset, rows, size, self._clock.monotonic())
        self.progress.records += 1
        # Decoding takes a few dozen microseconds a record: let heartbeats in between.
        await asyncio.sleep(0)

    async def _read(self, record: Record) -> Rows:
        """Return the rows of a record; none for one that cannot be stored, which goes to `dead`."""
        stream = self._streams[record.topic]
        try:
            return await stream.read(record, self._bus)
        except DecodeError as error:
            if not stream.buried_elsewhere:
                await self._bury(record, POISON, error)
        except RowError as error:
            await self._bury(record, NOT_STORED, error)
        return {}

    async def _bury(self, record: Record, kind: str, error: ValueError) -> None:
        log.warning("record %s:%d to dead: %s", record.tp, record.offset, error)
        await bury(self._bus, self._clock, record, Death(stage=GROUP, kind=kind, cause=str(error)))
        self.progress.buried += 1

    async def _flush(self, consumer: Consumer, ranges: list[Range]) -> None:
        """Store ranges, each of a partition of its own, and commit them."""
        owners = {due.tp: self._buffers.get(due.tp) for due in ranges}
        ranges = [due for due in ranges if owners[due.tp] is not None]
        if not await self._commit(consumer, {due.tp: due.intent for due in ranges}):
            return
        limit = asyncio.Semaphore(INSERTS_AT_ONCE)

        async def store(due: Range) -> None:
            async with limit:
                for table, rows in due.rows.items():
                    await self._patiently(partial(self._insert, due, table, rows), give_up=False)

        await together(store(due) for due in ranges)
        # A partition that was lost meanwhile belongs to a member that inserts the same range; its commit is theirs.
        kept = [due for due in ranges if self._buffers.get(due.tp) is owners[due.tp]]
        await self._patiently(partial(self._tell_conflicts, kept), give_up=False)
        await self._patiently(partial(self._record_positions, kept), give_up=False)
        if await self._commit(consumer, {due.tp: due.done for due in kept}):
            self._finish(kept)

    def _finish(self, ranges: list[Range]) -> None:
        now = self._clock.monotonic()
        for due in ranges:
            self.progress.ranges += 1
            self.progress.rows += sum(map(len, due.rows.values()))
            self.progress.stored_to[due.tp] = due.last + 1
            if (buffer := self._buffers.get(due.tp)) is not None:
                buffer.stored(due, now)

    async def _commit(self, consumer: Consumer, offsets: dict[TopicPartition, Committed]) -> bool:
        """Commit; False if that failed: the same ranges are tried again, by us or by whoever owns them next."""
        try:
            await consumer.commit(offsets)
        except NotOwner as error:
            log.info("ranges not committed, a rebalance is under way: %s", error)
            return False
        except BusError as error:
            log.warning("ranges not committed, tried again soon: %s", error)
            return False
        return True

    async def _patiently(self, work: Callable[[], Awaitable[None]], *, give_up: bool = True) -> bool:
        """Do the work again until ClickHouse takes it; False if the sink was stopped meanwhile.

        Raises:
            StoreError: waiting will not mend it.
        """
        pause_s = RETRY_FIRST_S
        while True:
            try:
                await work()
            except StoreError as error:
                if not error.passing:
                    raise
                self._note_failure(error, pause_s)
            else:
                self.progress.failing_since = None
                return True
            if give_up and self._stopping.is_set():
                return False
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    def _note_failure(self, error: StoreError, pause_s: float) -> None:
        now = self._clock.monotonic()
        if self.progress.failing_since is None:
            self.progress.failing_since = now
        self.progress.last_error = str(error)
        away_s = now - self.progress.failing_since
        log.warning("waiting for ClickHouse for %.0f s, next try in %.1f s: %s", away_s, pause_s, error)

    async def _pause(self, seconds: float) -> None:
        """Sleep; a stop that comes meanwhile ends it early."""
        if self._stopping.is_set():
            await self._clock.sleep(min(seconds, RETRY_FIRST_S))
            return
        await wait_for(self._stopping, self._clock, seconds)

    async def _assigned(self, starts: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int]:
        """Begin a buffer for each partition that is new to this member; one that was kept keeps its buffer."""
        log.info("%s: stores %d partitions", GROUP, len(starts))
        kept = {tp: self._buffers[tp].next_offset for tp in starts.keys() & self._buffers.keys()}
        for tp in starts.keys() - self._buffers.keys():
            self._buffers[tp] = PartitionBuffer(tp, starts[tp], wait_s=self._streams[tp.topic].wait_s)
        return kept

    async def _revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """Forget what is not stored: whoever owns the partition next reads it again."""
        for tp in partitions:
            self._buffers.pop(tp, None)
        self._conflicts.forget(partitions)

    async def _open(self) -> None:
        await schema.apply(self._address)
        self._client = await connect(self._address)
        # The client library imports pandas, where there is one, at the first insert: a second that the loop lacks.
        await asyncio.to_thread(InsertContext, "warm_up", ["a"], [get_from_name("UInt8")], [[0]])

    async def _insert(self, due: Range, table: str, rows: list[Row]) -> None:
        assert self._client is not None, "run() connects before it joins the group"
        columns = _COLUMNS[table].columns
        # Columns, not rows: three times as fast to encode.
        data = await asyncio.to_thread(lambda: list(zip(*rows, strict=True)))
        try:
            await self._client.insert(
                table,
                data,
                column_names=list(columns),
                column_type_names=list(columns.values()),
                column_oriented=True,
                settings={
                    # An asynchronous insert would be acknowledged in a batch with others, under another token.
                    "async_insert": 0,
                    "insert_deduplicate": 1,
                    "insert_deduplication_token": due.token(self._group, table),
                },
            )
        except FAILURES as error:
            raise explained(error, f"inserting {len(rows)} rows of {due.tp} {due.first}-{due.last}") from error

    async def _tell_conflicts(self, ranges: list[Range]) -> None:
        assert self._client is not None, "run() connects before it joins the group"
        for due in ranges:
            self.progress.buried += await self._conflicts.write(self._client, due)

    async def _record_positions(self, ranges: list[Range]) -> None:
        if not ranges:
            return
        assert self._client is not None, "run() connects before it joins the group"
        try:
            await self._client.insert(
                "positions",
                [[due.tp.topic, due.tp.partition, due.last + 1] for due in ranges],
                column_names=["topic", "partition", "position"],
                column_type_names=["LowCardinality(String)", "UInt32", "UInt64"],
                settings={"async_insert": 0},
            )
        except FAILURES as error:
            raise explained(error, "recording positions") from error
