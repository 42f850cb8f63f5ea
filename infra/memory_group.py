"""A consumer group of the log in memory: its members, who has which partition, and how far they are.

As eager as Kafka's: in a rebalance all members stop, all positions go back to what was committed unless the listener
says otherwise, and nobody commits between its first callback and its last. A partition has one owner at a time.
Knows nothing of who publishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from infra.bus import Committed, Listener, Record, TopicPartition
from infra.clock import Clock, wait_for
from infra.errors import BusError, NotOwner
from infra.memory_log import MemoryLog
from schemas.limits import METADATA_BYTES

T = TypeVar("T")

BeforeCommit = Callable[[str, Mapping[TopicPartition, Committed]], None]
"""Told the group and its new progress; raises BusError to refuse it."""


class MemoryGroup:
    """The members of a group in the order they joined, and its progress."""

    def __init__(self, name: str, log: MemoryLog, before_commit: BeforeCommit) -> None:
        self.name = name
        self.members: list[MemoryMember] = []
        self.committed: dict[TopicPartition, Committed] = {}
        self._log = log
        self._before_commit = before_commit
        self._rebalancing = asyncio.Lock()

    async def join(self, member: MemoryMember) -> None:
        """Take a member in; returns when the group is balanced."""
        self.members.append(member)
        await self._rebalance()

    async def leave(self, member: MemoryMember) -> None:
        """Take a member out, if it is still in."""
        if member in self.members:
            self.members.remove(member)
            await self._rebalance()

    def starting_points(self, owned: Iterable[TopicPartition]) -> dict[TopicPartition, Committed]:
        """Return where the group goes on: at what it committed, else at the earliest record."""
        return {part: self.committed.get(part) or Committed(self._log.begin(part)) for part in sorted(owned)}

    def store(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Keep the group's progress. Raises BusError where the metadata is too long, or the log refuses."""
        self._before_commit(self.name, offsets)
        for partition, progress in offsets.items():
            if len(progress.metadata.encode()) > METADATA_BYTES:
                raise BusError(f"committing {partition}: metadata of more than {METADATA_BYTES} bytes")
        self.committed.update(offsets)

    async def _rebalance(self) -> None:
        async with self._rebalancing:
            members = list(self.members)
            for member in members:
                await member.pause()
            wanted = {part for member in members for topic in member.topics for part in self._log.partitions(topic)}
            shares = share(sorted(wanted), [(member.topics, member.assignment()) for member in members])
            # All lose before anyone gains: a partition has one owner at a time.
            for member, owned in zip(members, shares, strict=True):
                await member.lose(member.assignment() - owned)
            for member, owned in zip(members, shares, strict=True):
                await member.gain(owned)


class MemoryMember:
    """One member of a consumer group (`infra.bus.Consumer`)."""

    def __init__(
        self,
        group: MemoryGroup,
        log: MemoryLog,
        clock: Clock,
        topics: frozenset[str],
        listener: Listener,
    ) -> None:
        self.topics = topics
        self._group = group
        self._log = log
        self._clock = clock
        self._listener = listener
        self._owned: frozenset[TopicPartition] = frozenset()
        self._position: dict[TopicPartition, int] = {}
        self._ready = False
        self._joining = False
        self._moves = 0
        """Counts the rebalances and seeks that this member went through."""
        self._broken: Exception | None = None
        self._news = log.listen(topics)

    async def poll(
        self, max_records: int, timeout_s: float, *, without: Collection[TopicPartition] = ()
    ) -> list[Record]:
        """Return up to max_records records, or none after timeout_s; see `infra.bus.Consumer`."""
        give_up = self._clock.monotonic() + timeout_s
        while True:
            self._news.clear()
            if self._broken is not None:
                raise self._broken
            if self._ready and max_records > 0 and (found := self._log.take(self._position, max_records, without)):
                moves = self._moves
                await asyncio.sleep(0)
                if moves == self._moves:
                    return found
                continue  # a rebalance moved the positions meanwhile: what they bring now is right
            left_s = give_up - self._clock.monotonic()
            if left_s <= 0:
                await asyncio.sleep(0)
                return []
            await wait_for(self._news, self._clock, left_s)

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions this member owns now."""
        return self._owned

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Store the group's progress. Raises NotOwner or BusError."""
        await asyncio.sleep(0)
        foreign = sorted(offsets.keys() - self._owned)
        if foreign:
            raise NotOwner(f"group {self._group.name}: {foreign} belong to another member now")
        if self._joining:
            raise NotOwner(f"group {self._group.name}: a rebalance is under way, its end is not known yet")
        self._group.store(offsets)

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue an owned partition at this offset."""
        if partition not in self._owned:
            raise NotOwner(f"group {self._group.name}: cannot seek in {partition}, it belongs to another member")
        self._moves += 1
        self._position[partition] = offset

    def position(self, partition: TopicPartition) -> int:
        """Return the next offset that will be handed out; see `infra.bus.Consumer`."""
        if partition not in self._position:
            raise NotOwner(f"group {self._group.name}: {partition} has no position here, it belongs to another member")
        return self._position[partition]

    async def close(self) -> None:
        """Leave the group; no callback is called."""
        self.forget()
        self._log.deafen(self._news)
        await self._group.leave(self)

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
        starts = self._group.starting_points(owned)
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
