"""Reading from Kafka: a member of a consumer group, and a reader outside all groups.

What aiokafka does not promise, and this file does:

- it hands out records before the assignment callback has returned, and its calls wait through a rebalance without a
  limit. Here every call runs as a task that is waited for; whatever it brings after the assignment changed, or after
  its caller left, is given back by a seek to the next offset that was not handed out (`_next`);
- it resets an offset out of range silently, unless told not to reset at all. Here nothing resets: a new group is
  positioned at the earliest offset by hand, and anything else out of range is an OffsetLost;
- a commit that it sends while its request to join waits is answered after it, with "another generation", and the client
  then joins once more: whoever commits regularly would keep its group rebalancing for as long as that takes. Here
  nothing is sent from the end of `on_rebalance` until the assignment is known;
- it raises at a header whose name is not UTF-8, again and again. Here it does not (`kafka_headers.py`);
- it logs and forgets errors of the callbacks. Here the next poll raises them;
- its protocol is eager: each rebalance takes everything away and gives most of it back. Here `on_revoked` gets only
  what did not come back, or everything if the membership itself was lost in between.

Whether work in flight survives a rebalance is not known here: that is the worker's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    KafkaError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
)
from aiokafka.structs import ConsumerRecord, OffsetAndMetadata

from infra.bus import Committed, Listener, Record, TopicPartition
from infra.errors import BusError, NotOwner, OffsetLost
from infra.kafka_headers import read_any_header
from infra.kafka_link import KafkaLink

log = logging.getLogger(__name__)

read_any_header()

_TELLING_SHARE = 0.5
"""Part of the time for a rebalance that its beginning may take: the rest is for the join, else the group goes on
without this member."""

_GRACE_S = 0.25
"""The client keeps its own time; a call is left alone only when it is this late, seconds."""

_NOTHING = KafkaPartition("", -1)
"""Asking for a partition that nobody owns counts as a poll and takes no record out of the buffers. Pausing would drop
them."""

Found = Mapping[KafkaPartition, list[ConsumerRecord]]


@dataclass(frozen=True)
class _Call:
    """A call of the client under way."""

    epoch: int
    """Assignment (or seek) it was made under."""
    task: asyncio.Task[Found]


class _Callbacks(ConsumerRebalanceListener):  # type: ignore[misc]  # the package has no types
    """Passes the client's callbacks on to the member."""

    def __init__(self, member: GroupMember) -> None:
        self._member = member

    async def on_partitions_revoked(self, revoked: set[KafkaPartition]) -> None:
        await self._member.pause()

    async def on_partitions_assigned(self, assigned: set[KafkaPartition]) -> None:
        await self._member.take_over(assigned)


class GroupMember:
    """One member of a consumer group (`infra.bus.Consumer`)."""

    def __init__(self, link: KafkaLink, group: str, listener: Listener) -> None:
        self._link = link
        self._group = group
        self._listener = listener
        self._owned: frozenset[TopicPartition] = frozenset()
        self._next: dict[TopicPartition, int] = {}
        self._ready = asyncio.Event()
        self._settled = asyncio.Event()
        self._joining = False
        """A request to join is on its way, or answered and not carried out yet."""
        self._committing = asyncio.Lock()
        self._epoch = 0
        self._call: _Call | None = None
        self._membership: tuple[str, int] = ("", -1)
        self._broken: Exception | None = None
        self._client = self._make_client()

    def _make_client(self) -> AIOKafkaConsumer:
        limits = self._link.limits
        # The sticky assignor keeps its state on its class: members of one process need one class each.
        own_assignor = type("OwnStickyAssignor", (StickyPartitionAssignor,), {})
        client = AIOKafkaConsumer(
            **self._link.options(),
            group_id=self._link.prefix + self._group,
            enable_auto_commit=False,
            auto_offset_reset="none",
            partition_assignment_strategy=(own_assignor,),
            session_timeout_ms=int(limits.session_s * 1000),
            heartbeat_interval_ms=int(limits.heartbeat_s * 1000),
            rebalance_timeout_ms=int(limits.rebalance_s * 1000),
            max_poll_interval_ms=int(limits.max_poll_s * 1000),
            fetch_max_wait_ms=limits.fetch_wait_ms,
            max_partition_fetch_bytes=limits.fetch_bytes,
        )
        # A client that commits by itself would lose whatever is in work: worth a check, whatever its default becomes.
        assert client._enable_auto_commit is False  # noqa: SLF001 - it has no public name
        return client

    async def start(self, topics: list[str]) -> None:
        """Join the group and wait for the first assignment."""
        self._client.subscribe([self._link.prefix + topic for topic in topics], listener=_Callbacks(self))
        try:
            async with self._link.guarded(self._link.limits.join_s, f"joining group {self._group}"):
                await self._client.start()
                await self._settled.wait()
            self._raise_if_broken()
        except BaseException:
            await self.close()
            raise

    async def pause(self) -> None:
        """Hand out nothing more: a rebalance has begun. What is owned may still be committed."""
        self._epoch += 1
        self._ready.clear()
        if self._owned:
            await self._tell_of_rebalance()
        self._joining = True  # as soon as this returns
        with suppress(TimeoutError):
            async with asyncio.timeout(self._link.limits.commit_s), self._committing:
                pass  # a commit that is on its way, or waits for its coordinator, must not come after it

    async def _tell_of_rebalance(self) -> None:
        try:
            async with asyncio.timeout(_TELLING_SHARE * self._link.limits.rebalance_s):
                await self._listener.on_rebalance()
        except TimeoutError:
            # The group would go on without this member: what was not committed is handed out again.
            log.warning("group %s: the listener took too long at the start of a rebalance", self._group)
        except Exception as error:  # noqa: BLE001 - the client would log it and go on; the next poll raises it
            self._broken = error

    async def take_over(self, assigned: set[KafkaPartition]) -> None:
        """Tell what was lost, position what is owned, then hand out again."""
        owned = frozenset(self._link.inner(partition) for partition in assigned)
        lost = self._owned - owned if self._kept_membership() else self._owned
        self._owned, self._next = owned, {}
        try:
            if lost:
                await self._listener.on_revoked(lost)
            starts = await self._starting_points(owned)
            elsewhere = await self._listener.on_assigned(starts)
            self._next = {part: elsewhere.get(part, progress.offset) for part, progress in starts.items()}
            for partition, offset in self._next.items():
                self._client.seek(self._link.outer(partition), offset)
        except Exception as error:  # noqa: BLE001 - the client would log it and go on; the next poll raises it
            self._broken = error
        else:
            self._joining = False
            self._ready.set()
        self._settled.set()

    def _kept_membership(self) -> bool:
        """Tell whether nobody else can have owned our partitions since the last assignment."""
        coordinator = self._client._coordinator  # noqa: SLF001 - the generation has no public name
        before, self._membership = self._membership, (coordinator.member_id, coordinator.generation)
        return self._membership == (before[0], before[1] + 1)

    async def _starting_points(self, owned: frozenset[TopicPartition]) -> dict[TopicPartition, Committed]:
        topics = sorted({partition.topic for partition in owned})
        committed = await self._link.committed(self._group, topics)
        starts = {partition: progress for partition, progress in committed.items() if partition in owned}
        for topic in sorted({partition.topic for partition in owned - starts.keys()}):
            for number, offset in (await self._link.begin_offsets(topic)).items():
                partition = TopicPartition(topic, number)
                if partition in owned:
                    starts.setdefault(partition, Committed(offset))
        return starts

    async def poll(
        self, max_records: int, timeout_s: float, *, without: Collection[TopicPartition] = ()
    ) -> list[Record]:
        """Return up to max_records records, or none after timeout_s; see `infra.bus.Consumer`."""
        self._raise_if_broken()
        started = asyncio.get_running_loop().time()
        if not await _within(self._ready.wait(), timeout_s):
            self._raise_if_broken()
            return []
        left_s = max(0.0, timeout_s - (asyncio.get_running_loop().time() - started))
        asked = self._owned.difference(without) if max_records > 0 else ()
        wanted = [self._link.outer(partition) for partition in asked]
        found = await self._fetch(wanted or [_NOTHING], max(max_records, 1), left_s)
        return [self._handed_out(record) for records in found.values() for record in records]

    async def _fetch(self, wanted: list[KafkaPartition], max_records: int, timeout_s: float) -> Found:
        call = self._call
        if call is None:
            getting = self._client.getmany(*wanted, timeout_ms=int(timeout_s * 1000), max_records=max_records)
            call = self._call = _Call(self._epoch, asyncio.ensure_future(getting))
            ours = True
        else:
            ours = False  # its caller left, or it sat through a rebalance
        await asyncio.wait({call.task}, timeout=timeout_s + _GRACE_S)
        if not call.task.done():
            return {}
        self._call = None
        try:
            found = call.task.result()
        except NoOffsetForPartitionError:
            return {}  # the client asked before `take_over` had positioned the partition
        except OffsetOutOfRangeError as error:
            await self._raise_if_lost(error)
            return {}
        except KafkaError as error:
            raise BusError(f"reading as group {self._group} at {self._link.bootstrap}: {error!r}") from error
        if ours and call.epoch == self._epoch:
            if not found:
                await self._pass_gaps(wanted)
            return found
        for partition in found.keys() & {self._link.outer(owned) for owned in self._next}:
            self._client.seek(partition, self._next[self._link.inner(partition)])
        return {}

    async def _pass_gaps(self, wanted: list[KafkaPartition]) -> None:
        """Follow the client where there was nothing but markers of transactions: it has passed over them."""
        epoch = self._epoch
        for partition in wanted:
            mine = self._link.inner(partition)
            if mine not in self._next:
                continue
            try:
                # Known to the client since `take_over`, so this does not wait; should it, a rebalance has the say.
                position = await self._client.position(partition)
            except KafkaError:
                return  # the assignment is just being taken away
            if epoch != self._epoch:
                return
            self._next[mine] = position

    async def _raise_if_lost(self, error: OffsetOutOfRangeError) -> None:
        for partition, offset in error.args[0].items():
            mine = self._link.inner(partition)
            # Else an answer from before a seek. What is there after all is fetched again: the client stays where it is.
            if self._next.get(mine) == offset and (said := await self._link.lost(mine, offset)):
                raise OffsetLost(said) from error

    def _handed_out(self, found: ConsumerRecord) -> Record:
        record = _record(self._link, found)
        self._next[record.tp] = record.offset + 1
        return record

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions this member owns now; during a rebalance, those it owned before."""
        return self._owned

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Store the group's progress. Raises NotOwner or BusError."""
        foreign = sorted(offsets.keys() - self._owned)
        if foreign:
            raise NotOwner(f"group {self._group}: {foreign} belong to another member now")
        progress = {
            self._link.outer(partition): OffsetAndMetadata(done.offset, done.metadata)
            for partition, done in offsets.items()
        }
        async with self._link.guarded(self._link.limits.commit_s, f"committing as group {self._group}"):
            try:
                async with self._committing:
                    if self._joining:
                        raise NotOwner(f"group {self._group}: a rebalance is under way, its end is not known yet")
                    await self._client.commit(progress)
            except (CommitFailedError, IllegalStateError) as error:
                raise NotOwner(f"group {self._group} has rebalanced: {error}") from error

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue an owned partition at this offset."""
        if partition not in self._owned:
            raise NotOwner(f"group {self._group}: cannot seek in {partition}, it belongs to another member")
        self._epoch += 1  # what a call under way brings is from before
        self._next[partition] = offset
        self._client.seek(self._link.outer(partition), offset)

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset that will be handed out; see `infra.bus.Consumer`."""
        if partition not in self._next:
            raise NotOwner(f"group {self._group}: {partition} has no position here, another member's or not told yet")
        return self._next[partition]

    async def close(self) -> None:
        """Leave the group; no callback is called."""
        self._ready.clear()
        self._owned = frozenset()
        await _close(self._link, self._client, self._call.task if self._call else None)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken


class PartitionReader:
    """Reads whole partitions from given offsets, in no group (`infra.bus.Reader`)."""

    def __init__(self, link: KafkaLink, start: Mapping[TopicPartition, int]) -> None:
        self._link = link
        self._position = dict(start)
        self._client: AIOKafkaConsumer

    async def start(self) -> None:
        """Connect and take the positions; OffsetLost if one is not in the log."""
        for topic in sorted({partition.topic for partition in self._position}):
            begin, end = await self._link.begin_offsets(topic), await self._link.end_offsets(topic)
            for partition, offset in self._position.items():
                inside = partition.topic != topic or begin[partition.partition] <= offset <= end[partition.partition]
                if not inside and (said := await self._link.lost(partition, offset)):
                    raise OffsetLost(said)
        self._client = AIOKafkaConsumer(
            **self._link.options(),
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=self._link.limits.fetch_wait_ms,
            max_partition_fetch_bytes=self._link.limits.fetch_bytes,
        )
        try:
            async with self._link.guarded(self._link.limits.connect_s, "connecting a reader"):
                await self._client.start()
        except BaseException:
            await self.close()
            raise
        self._client.assign([self._link.outer(partition) for partition in self._position])
        for partition, offset in self._position.items():
            self._client.seek(self._link.outer(partition), offset)
        # The client's `stop` cancels a task of its own and awaits it: one that never ran yet would cancel the caller.
        await asyncio.sleep(0)

    async def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        """Return up to max_records records, or none after timeout_s; in offset order per partition."""
        try:
            found = await self._client.getmany(timeout_ms=int(timeout_s * 1000), max_records=max_records)
            # The client's position also passes over gaps: compacted records, markers of transactions.
            positions = {part: await self._client.position(self._link.outer(part)) for part in self._position}
        except OffsetOutOfRangeError as error:
            lost, offset = next(iter(error.args[0].items()))
            if said := await self._link.lost(self._link.inner(lost), offset):
                raise OffsetLost(said) from error
            return []  # it is there after all, and is fetched again
        except KafkaError as error:
            for partition, offset in self._position.items():
                self._client.seek(self._link.outer(partition), offset)  # what was fetched by now comes again
            raise BusError(f"reading at {self._link.bootstrap}: {error!r}") from error
        self._position = positions
        return [_record(self._link, record) for records in found.values() for record in records]

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset that will be handed out."""
        return self._position[partition]

    async def close(self) -> None:
        """Stop reading."""
        await _close(self._link, self._client, None)


def _record(link: KafkaLink, found: ConsumerRecord) -> Record:
    return Record(
        topic=found.topic.removeprefix(link.prefix),
        partition=found.partition,
        offset=found.offset,
        timestamp_ms=found.timestamp,
        key=found.key,
        value=found.value,
        # Kafka has headers whose value is null, and nobody here makes or wants them.
        headers=tuple([(name, value or b"") for name, value in found.headers]),
    )


async def _close(link: KafkaLink, client: AIOKafkaConsumer, call: asyncio.Task[Found] | None) -> None:
    try:
        async with link.guarded(link.limits.close_s, "closing a consumer"):
            await client.stop()
    finally:
        if call is not None:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)


async def _within(waiting: Any, limit_s: float) -> bool:
    """Wait for something at most this long; tell whether it came. A limit of 0 still sees what is there already."""
    try:
        async with asyncio.timeout(limit_s):
            await waiting
    except TimeoutError:
        return False
    return True
