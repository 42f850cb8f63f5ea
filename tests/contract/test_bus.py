"""What `infra/bus.py` promises, held against every implementation: the twin in memory and a real Kafka."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import RecordsToDelete

from infra.bus import Bus, Committed, Consumer, Listener, Reader, Record, TopicPartition
from infra.errors import BusError, ConfigError, NotOwner, OffsetLost
from infra.kafka import KafkaBus, KafkaLimits
from infra.memory import MemoryBus
from schemas.messages import Task
from schemas.topics import HOUR_MS, Spread, Topic

WAIT_S = 10.0
PREFIXES = itertools.count()
KAFKA_LIMITS = KafkaLimits(heartbeat_s=0.1, session_s=6.0, max_poll_s=1.0, topic_s=0.3, connect_s=5.0)


def topic(name: str, partitions: int) -> Topic[Task]:
    return Topic(
        name=name,
        carries=(Task,),
        partitions=partitions,
        spread=Spread.ROUND_ROBIN,
        producers=(),
        consumers=(),
        retention_ms=HOUR_MS,
    )


WORK = topic("work", 4)
ONE = topic("one", 1)
STATE = replace(topic("state", 1), retention_ms=None)


@dataclass
class Kit:
    """A bus under test, and what only the world outside it can do."""

    bus: Bus
    trim: Callable[[TopicPartition, int], Awaitable[None]]
    """Removes records as retention does."""
    expel: Callable[[Consumer], Awaitable[None]]
    """Makes the group think that a member is dead, without telling the member."""
    transact: Callable[[TopicPartition, bytes], Awaitable[None]]
    """Writes a record in a transaction of its own: behind it lies an offset that is no record."""


async def memory_kit() -> AsyncIterator[Kit]:
    bus = MemoryBus()

    async def trim(partition: TopicPartition, before: int) -> None:
        bus.trim(partition, before)

    async def transact(partition: TopicPartition, value: bytes) -> None:
        await bus.publish(partition.topic, value, partition=partition.partition)
        bus.mark(partition)

    await bus.start()
    yield Kit(bus, trim, bus.expel, transact)
    await bus.close()


async def kafka_kit(address: str) -> AsyncIterator[Kit]:
    prefix = f"contract{next(PREFIXES)}."
    bus = KafkaBus(address, prefix=prefix, limits=KAFKA_LIMITS)

    async def trim(partition: TopicPartition, before: int) -> None:
        where = KafkaPartition(prefix + partition.topic, partition.partition)
        await bus._link.admin.delete_records({where: RecordsToDelete(before_offset=before)})

    async def expel(consumer: Consumer) -> None:
        # A member that does not poll for `max_poll_s` leaves the group by itself, and does not notice.
        coordinator = consumer._client._coordinator  # type: ignore[attr-defined]
        await until(lambda: coordinator.member_id == "", "the member was expelled")

    async def transact(partition: TopicPartition, value: bytes) -> None:
        foreign = AIOKafkaProducer(bootstrap_servers=address, transactional_id=f"{prefix}foreign")
        async with foreign, foreign.transaction():
            await foreign.send_and_wait(prefix + partition.topic, value, partition=partition.partition)

    await bus.start()
    yield Kit(bus, trim, expel, transact)
    await bus.close()


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.integration)])
async def kit(request: pytest.FixtureRequest) -> AsyncIterator[Kit]:
    kits = memory_kit() if request.param == "memory" else kafka_kit(request.getfixturevalue("kafka"))
    async for made in kits:
        await made.bus.create_topics([WORK, ONE, STATE])
        yield made


@pytest.fixture
def bus(kit: Kit) -> Bus:
    return kit.bus


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a limit."""
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {WAIT_S} s until {what}"
        await asyncio.sleep(0.01)


async def receive(source: Consumer | Reader, count: int) -> list[Record]:
    """Poll until so many records came, with a limit."""
    found: list[Record] = []
    give_up = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < give_up, f"waited {WAIT_S} s for {count} records, got {len(found)}"
        found += await source.poll(count - len(found), 0.2)
    return found


async def follow(source: Consumer | Reader, partition: TopicPartition, position: int) -> None:
    """Poll until a source has come to this position, with a limit; nothing else may come."""
    give_up = time.monotonic() + WAIT_S
    while source.position(partition) != position:
        assert time.monotonic() < give_up, f"waited {WAIT_S} s for {position}, is at {source.position(partition)}"
        assert [] == await source.poll(10, 0.2)


async def fill(bus: Bus, name: str, count: int, partition: int | None = 0) -> None:
    for number in range(count):
        await bus.publish(name, b"%d" % number, partition=partition)


class TestPublish:
    async def test_a_published_record_is_read_as_it_was(self, bus: Bus) -> None:
        """Key, value, headers, place and time of a record survive the log."""
        before_ms = time.time_ns() // 1_000_000
        position = await bus.publish("work", b"v", key=b"k", partition=2, headers=(("a", b"1"), ("a", b"2")))
        reader = await bus.read({TopicPartition("work", 2): 0})
        (record,) = await receive(reader, 1)
        await reader.close()

        assert position == (2, 0)
        assert (record.topic, record.partition, record.offset) == ("work", 2, 0)
        assert (record.key, record.value, record.headers) == (b"k", b"v", (("a", b"1"), ("a", b"2")))
        assert before_ms <= record.timestamp_ms <= time.time_ns() // 1_000_000

    async def test_records_without_a_partition_spread_evenly(self, bus: Bus) -> None:
        """Siblings share a key and still spread over all partitions."""
        places = [(await bus.publish("work", b"v", key=b"group")).partition for _ in range(8)]

        assert Counter(places) == {0: 2, 1: 2, 2: 2, 3: 2}

    async def test_a_record_may_remove_its_key(self, bus: Bus) -> None:
        """A record without a value is a tombstone and arrives as None."""
        await bus.publish("state", None, key=b"cancel/1")
        reader = await bus.read({TopicPartition("state", 0): 0})
        (record,) = await receive(reader, 1)
        await reader.close()

        assert (record.key, record.value) == (b"cancel/1", None)

    async def test_many_at_once_are_all_placed(self, bus: Bus) -> None:
        """Concurrent publishing gives every record its own place."""
        places = await asyncio.gather(*(bus.publish("work", b"v") for _ in range(400)))

        assert len(set(places)) == 400
        assert await bus.end_offsets("work") == {0: 100, 1: 100, 2: 100, 3: 100}

    async def test_an_unknown_topic_is_named(self, bus: Bus) -> None:
        """A topic that does not exist is an error, never made on the fly."""
        with pytest.raises(BusError, match=r"no topic \S*wrok"):
            await bus.publish("wrok", b"v")

    async def test_an_unknown_partition_is_refused(self, bus: Bus) -> None:
        """A partition beyond the last one is an error."""
        with pytest.raises(BusError, match="no partition 4, it has 4"):
            await bus.publish("work", b"v", partition=4)

    async def test_nothing_at_all_is_refused(self, bus: Bus) -> None:
        """A record needs a key or a value."""
        with pytest.raises(BusError, match="needs a key or a value"):
            await bus.publish("work", None)

    async def test_a_compacted_topic_takes_no_record_without_a_key(self, bus: Bus) -> None:
        """What could never be replaced is refused, and the next record goes through."""
        with pytest.raises(BusError):
            await bus.publish("state", b"v")

        assert (await bus.publish("state", b"v", key=b"k")).offset == 0

    async def test_a_record_that_is_too_large_harms_no_other(self, bus: Bus) -> None:
        """The large one is refused, those around it arrive."""
        results = await asyncio.gather(
            *(bus.publish("one", bytes(size)) for size in (10, 1_000_001, 10)), return_exceptions=True
        )

        assert isinstance(results[1], BusError)
        assert sorted(result.offset for result in (results[0], results[2])) == [0, 1]  # type: ignore[union-attr]


class TestRead:
    async def test_a_reader_starts_where_it_is_told(self, bus: Bus) -> None:
        """Offsets before the start are not handed out; the position is the next offset."""
        part = TopicPartition("one", 0)
        await fill(bus, "one", 5)
        reader = await bus.read({part: 3})
        found = await receive(reader, 2)
        position = reader.position(part)
        await reader.close()

        assert [record.value for record in found] == [b"3", b"4"]
        assert position == 5

    async def test_a_reader_may_be_closed_at_once(self, bus: Bus) -> None:
        """Closing before the first poll gives the reader up and nothing else."""
        reader = await bus.read({TopicPartition("one", 0): 0})
        await reader.close()

        assert await bus.end_offsets("one")

    async def test_a_reader_sees_what_comes_later(self, bus: Bus) -> None:
        """A reader at the end waits for the next record."""
        part = TopicPartition("one", 0)
        reader = await bus.read({part: 0})
        waiting = asyncio.create_task(receive(reader, 1))
        await bus.publish("one", b"late")
        (record,) = await waiting
        await reader.close()

        assert record.value == b"late"

    async def test_a_poll_hands_out_no_more_than_asked(self, bus: Bus) -> None:
        """The rest comes with the next poll, in order."""
        await fill(bus, "one", 5)
        reader = await bus.read({TopicPartition("one", 0): 0})
        first = await receive(reader, 2)
        rest = await receive(reader, 3)
        await reader.close()

        assert [record.offset for record in first + rest] == [0, 1, 2, 3, 4]

    async def test_a_poll_without_records_ends_in_time(self, bus: Bus) -> None:
        """Nothing there: an empty list after the time given."""
        reader = await bus.read({TopicPartition("one", 0): 0})
        found = await asyncio.wait_for(reader.poll(10, 0.05), WAIT_S)
        await reader.close()

        assert found == []

    async def test_an_offset_that_retention_removed_is_an_error(self, kit: Kit) -> None:
        """The error names topic, offset, what is left, and the retention."""
        part = TopicPartition("one", 0)
        await fill(kit.bus, "one", 4)
        await kit.trim(part, 3)

        with pytest.raises(OffsetLost, match=r"offset 1 of \S*one, partition 0.* 3 to 4 \(retention.ms=3600000\)"):
            await kit.bus.read({part: 1})

    async def test_an_offset_that_was_never_written_is_an_error(self, bus: Bus) -> None:
        """An offset beyond the end means another log than the caller thinks."""
        with pytest.raises(OffsetLost, match="offset 7"):
            await bus.read({TopicPartition("one", 0): 7})

    async def test_edges_of_the_log(self, kit: Kit) -> None:
        """The first offset still there and the next to be written, for every partition."""
        await fill(kit.bus, "work", 3, partition=1)
        await kit.trim(TopicPartition("work", 1), 2)

        assert await kit.bus.begin_offsets("work") == {0: 0, 1: 2, 2: 0, 3: 0}
        assert await kit.bus.end_offsets("work") == {0: 0, 1: 3, 2: 0, 3: 0}

    async def test_a_reader_passes_over_offsets_that_hold_no_record(self, kit: Kit) -> None:
        """At the end too: a reader that has read everything is at the end."""
        part = TopicPartition("one", 0)
        for value in (b"a", b"b"):
            await kit.transact(part, value)
        reader = await kit.bus.read({part: 0})
        found = await receive(reader, 2)
        await follow(reader, part, 4)
        await reader.close()

        assert [(0, b"a"), (2, b"b")] == [(record.offset, record.value) for record in found]
        assert {0: 4} == await kit.bus.end_offsets("one")


class TestGroup:
    async def test_a_member_passes_over_offsets_that_hold_no_record(self, kit: Kit) -> None:
        """A poll that brings nothing has seen the end: who has read everything has nothing left to do."""
        part = TopicPartition("one", 0)
        for value in (b"a", b"b"):
            await kit.transact(part, value)
        member = await kit.bus.join(["one"], "g")
        found = await receive(member, 2)
        before = member.position(part)
        await follow(member, part, 4)
        await member.close()

        assert ([0, 2], 3) == ([record.offset for record in found], before)

    async def test_a_position_is_known_to_the_owner_alone(self, bus: Bus) -> None:
        """It is what a poll hands out next; where others read is theirs to say."""
        await fill(bus, "one", 3)
        member = await bus.join(["one"], "g")
        part = TopicPartition("one", 0)
        await receive(member, 2)
        read = member.position(part)
        await member.seek(part, 1)
        sought = member.position(part)
        with pytest.raises(NotOwner):
            member.position(TopicPartition("work", 0))
        await member.close()

        assert (2, 1) == (read, sought)

    async def test_a_new_group_starts_at_the_earliest_record(self, kit: Kit) -> None:
        """What was published before the group existed is handed out, in order, from the first kept offset on."""
        await fill(kit.bus, "one", 5)
        await kit.trim(TopicPartition("one", 0), 2)
        member = await kit.bus.join(["one"], "g")
        found = await receive(member, 3)
        await member.close()

        assert [record.offset for record in found] == [2, 3, 4]

    async def test_several_topics_in_one_group(self, bus: Bus) -> None:
        """A member of two topics gets the records of both."""
        await bus.publish("one", b"a")
        await bus.publish("work", b"b")
        member = await bus.join(["one", "work"], "g")
        found = await receive(member, 2)
        await member.close()

        assert {record.topic for record in found} == {"one", "work"}

    async def test_a_group_goes_on_after_what_it_committed(self, bus: Bus) -> None:
        """The next member starts at the committed offset, not where the last one had read to."""
        part = TopicPartition("one", 0)
        await fill(bus, "one", 4)
        first = await bus.join(["one"], "g")
        await receive(first, 4)
        await first.commit({part: Committed(2, "rm1:x")})
        await first.close()
        second = await bus.join(["one"], "g")
        found = await receive(second, 2)
        await second.close()

        assert [record.offset for record in found] == [2, 3]
        assert await bus.committed("g", "one") == {0: Committed(2, "rm1:x")}

    async def test_groups_are_independent(self, bus: Bus) -> None:
        """Two groups each get every record."""
        await fill(bus, "one", 2)
        one, other = await bus.join(["one"], "g"), await bus.join(["one"], "h")
        found = [len(await receive(one, 2)), len(await receive(other, 2))]
        await one.close()
        await other.close()

        assert found == [2, 2]

    async def test_progress_can_be_kept_for_a_group_without_members(self, bus: Bus) -> None:
        """Whoever reads by itself stores its place and a text, again and again, for one partition and another."""
        await fill(bus, "work", 3, partition=1)
        await bus.commit("alone", {TopicPartition("work", 1): Committed(2, "two")})
        await bus.commit("alone", {TopicPartition("work", 1): Committed(3, "three")})
        await bus.commit("alone", {TopicPartition("work", 3): Committed(0)})
        await bus.commit("other", {TopicPartition("work", 1): Committed(1)})

        assert await bus.committed("alone", "work") == {1: Committed(3, "three"), 3: Committed(0)}
        assert await bus.committed("other", "work") == {1: Committed(1)}

    async def test_only_members_commit_for_a_group_that_has_some(self, bus: Bus) -> None:
        """The progress of who works in it is not overwritten; once all have left it may be."""
        await fill(bus, "one", 2)
        member = await bus.join(["one"], "g")
        with pytest.raises(NotOwner, match="group g has members"):
            await bus.commit("g", {TopicPartition("one", 0): Committed(2)})
        before = await bus.committed("g", "one")
        await member.close()
        await bus.commit("g", {TopicPartition("one", 0): Committed(2)})

        assert ({}, {0: Committed(2)}) == (before, await bus.committed("g", "one"))

    async def test_progress_on_an_unknown_topic_is_refused(self, bus: Bus) -> None:
        """The error names the topic."""
        with pytest.raises(BusError, match=r"no topic .*nowhere"):
            await bus.commit("alone", {TopicPartition("nowhere", 0): Committed(1)})

    async def test_an_unknown_group_has_no_progress(self, bus: Bus) -> None:
        """Partitions without progress are left out."""
        assert await bus.committed("nobody", "work") == {}

    async def test_polling_for_nothing_takes_nothing(self, bus: Bus) -> None:
        """With max_records = 0 a busy member shows that it lives, and loses no record."""
        await fill(bus, "one", 1)
        member = await bus.join(["one"], "g")
        nothing = await member.poll(0, 0.05)
        (record,) = await receive(member, 1)
        await member.close()

        assert nothing == []
        assert record.offset == 0

    async def test_a_poll_hands_out_no_more_than_asked(self, bus: Bus) -> None:
        """The bound holds over all partitions together."""
        await fill(bus, "work", 12, partition=None)
        member = await bus.join(["work"], "g")
        sizes = []
        while sum(sizes) < 12:
            sizes.append(len(await member.poll(5, 0.2)))
        await member.close()

        assert max(sizes) <= 5

    async def test_a_partition_can_be_left_alone_for_a_while(self, bus: Bus) -> None:
        """A poll without it hands out the others only; later it goes on in order, with nothing lost."""
        shut = TopicPartition("work", 1)
        await fill(bus, "work", 8, partition=None)
        member = await bus.join(["work"], "g")
        others: list[Record] = []
        give_up = time.monotonic() + WAIT_S
        while len(others) < 6:
            assert time.monotonic() < give_up, f"waited {WAIT_S} s for six records, got {others}"
            others += await member.poll(10, 0.2, without={shut})
        nothing = await member.poll(10, 0.05, without={shut})
        later = await receive(member, 2)
        await member.close()

        assert {record.tp for record in others} == ALL - {shut}
        assert nothing == []
        assert [(record.tp, record.offset) for record in later] == [(shut, 0), (shut, 1)]

    async def test_a_cancelled_poll_loses_nothing(self, bus: Bus) -> None:
        """A poll whose caller leaves hands its records out later."""
        member = await bus.join(["one"], "g")
        polling = asyncio.create_task(member.poll(10, WAIT_S))
        await asyncio.sleep(0)
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await fill(bus, "one", 3)
        found = await receive(member, 3)
        await member.close()

        assert [record.offset for record in found] == [0, 1, 2]

    async def test_seek_goes_back_and_forth(self, bus: Bus) -> None:
        """After a seek the partition goes on at that offset."""
        part = TopicPartition("one", 0)
        await fill(bus, "one", 4)
        member = await bus.join(["one"], "g")
        await receive(member, 4)
        await member.seek(part, 1)
        again = await receive(member, 3)
        await member.seek(part, 3)
        last = await receive(member, 1)
        await member.close()

        assert [record.offset for record in again + last] == [1, 2, 3, 3]

    async def test_metadata_of_4096_bytes_is_kept_and_no_more(self, bus: Bus) -> None:
        """The text beside an offset has Kafka's limit; more is refused and changes nothing."""
        part = TopicPartition("one", 0)
        member = await bus.join(["one"], "g")
        await member.commit({part: Committed(0, "x" * 4096)})
        with pytest.raises(BusError):
            await member.commit({part: Committed(0, "x" * 4097)})
        kept = await bus.committed("g", "one")
        await member.close()

        assert kept == {0: Committed(0, "x" * 4096)}

    async def test_a_committed_offset_that_retention_removed_is_an_error(self, kit: Kit) -> None:
        """A group that fell behind the retention stops with an error that names it, instead of skipping."""
        part = TopicPartition("one", 0)
        await fill(kit.bus, "one", 4)
        first = await kit.bus.join(["one"], "g")
        await first.commit({part: Committed(1)})
        await first.close()
        await kit.trim(part, 3)
        second = await kit.bus.join(["one"], "g")
        try:
            with pytest.raises(OffsetLost, match=r"offset 1 of \S*one, partition 0.*retention.ms=3600000"):
                await receive(second, 1)
        finally:
            await second.close()


class Member:
    """A member that keeps polling, as a worker does, and remembers what it was told."""

    def __init__(self) -> None:
        self.found: list[Record] = []
        self.assigned: list[frozenset[TopicPartition]] = []
        self.starts: list[Mapping[TopicPartition, Committed]] = []
        self.revoked: list[frozenset[TopicPartition]] = []
        self.last_words: Mapping[TopicPartition, Committed] = {}
        """Committed when a rebalance begins."""
        self.late_words = False
        """Tries to commit when it is told what it owns."""
        self.refused: list[str] = []
        self.go_on: Mapping[TopicPartition, int] = {}
        """Where to go on after a rebalance, instead of at the committed offsets."""
        self.consumer: Consumer
        self._polling: asyncio.Task[None]

    async def join(self, bus: Bus, name: str = "work") -> Member:
        listener = Listener(on_rebalance=self._rebalance, on_revoked=self._revoke, on_assigned=self._assign)
        self.consumer = await bus.join([name], "g", listener)
        self._polling = asyncio.create_task(self._poll())
        return self

    async def _rebalance(self) -> None:
        if self.last_words:
            await self.consumer.commit(self.last_words)

    async def _revoke(self, partitions: frozenset[TopicPartition]) -> None:
        self.revoked.append(partitions)

    async def _assign(self, starts: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int]:
        self.assigned.append(frozenset(starts))
        self.starts.append(starts)
        if self.late_words:
            try:
                await self.consumer.commit({part: Committed(0, "late") for part in starts})
            except NotOwner as error:
                self.refused.append(str(error))
        return {part: offset for part, offset in self.go_on.items() if part in starts}

    async def _poll(self) -> None:
        while True:
            self.found += await self.consumer.poll(10, 0.1)

    async def stop_polling(self) -> None:
        self._polling.cancel()
        await asyncio.gather(self._polling, return_exceptions=True)

    async def close(self) -> None:
        await self.stop_polling()
        await self.consumer.close()


ALL = frozenset(TopicPartition("work", number) for number in range(4))


class TestRebalance:
    async def test_members_share_the_partitions(self, bus: Bus) -> None:
        """Two members own two partitions each, and together all of them."""
        one = await Member().join(bus)
        two = await Member().join(bus)
        await until(lambda: len(one.consumer.assignment()) == 2, "the first gave half away")
        shares = one.consumer.assignment(), two.consumer.assignment()
        await one.close()
        await two.close()

        assert len(shares[1]) == 2
        assert shares[0] | shares[1] == ALL

    async def test_members_are_told_what_they_lose_and_what_they_own(self, bus: Bus) -> None:
        """`on_assigned` gets all that is owned, `on_revoked` just what went away."""
        one = await Member().join(bus)
        two = await Member().join(bus)
        await until(lambda: len(one.assigned) == 2, "the first saw the second")
        kept = one.consumer.assignment()
        told = one.assigned, one.revoked, two.revoked
        await one.close()
        await two.close()

        assert told == ([ALL, kept], [ALL - kept], [])

    async def test_who_stays_gets_the_partitions_of_who_leaves(self, bus: Bus) -> None:
        """After a member closed, its partitions and their records go to the other."""
        one = await Member().join(bus)
        two = await Member().join(bus)
        await until(lambda: len(one.consumer.assignment()) == 2, "the first gave half away")
        await two.close()
        await until(lambda: one.consumer.assignment() == ALL, "the first owns everything again")
        await fill(bus, "work", 8, partition=None)
        await until(lambda: len(one.found) == 8, "the first got all records")
        found = Counter(record.tp for record in one.found)
        await one.close()

        assert found == dict.fromkeys(ALL, 2)

    async def test_every_record_is_handed_out_at_least_once(self, bus: Bus) -> None:
        """A rebalance may repeat records, never skip any."""
        one = await Member().join(bus)
        await fill(bus, "work", 40, partition=None)
        two = await Member().join(bus)
        await fill(bus, "work", 40, partition=None)

        def seen() -> set[tuple[int, int]]:
            return {(record.partition, record.offset) for record in one.found + two.found}

        await until(lambda: len(seen()) == 80, "all records were seen")
        await one.close()
        await two.close()

        assert seen() == {(part.partition, offset) for part in ALL for offset in range(20)}

    async def test_positions_go_back_to_what_was_committed(self, bus: Bus) -> None:
        """Retained partitions too are handed out again from the committed offset on."""
        await fill(bus, "work", 12, partition=None)
        one = await Member().join(bus)
        await until(lambda: len(one.found) == 12, "the first got everything")
        await one.consumer.commit({part: Committed(2) for part in ALL})
        two = await Member().join(bus)
        await until(lambda: len(one.found) + len(two.found) == 16, "four records came again")
        again = Counter((record.partition, record.offset) for record in one.found[12:] + two.found)
        await one.close()
        await two.close()

        assert again == {(number, 2): 1 for number in range(4)}

    async def test_a_member_may_commit_when_a_rebalance_begins(self, bus: Bus) -> None:
        """Its last words reach whoever owns the partition next, with their text."""
        one = await Member().join(bus)
        await fill(bus, "work", 12, partition=None)
        await until(lambda: len(one.found) == 12, "the first got everything")
        one.last_words = {part: Committed(2, f"of {part.partition}") for part in ALL}
        two = await Member().join(bus)
        inherited = two.starts[0]
        await one.close()
        await two.close()

        assert len(inherited) == 2
        assert inherited == {part: Committed(2, f"of {part.partition}") for part in inherited}

    async def test_from_the_first_callback_of_a_rebalance_to_the_last_nothing_is_committed(self, bus: Bus) -> None:
        """It could only count for an assignment that is over, so it is refused at once and disturbs nobody."""
        one = await Member().join(bus)
        one.late_words = True
        two = await Member().join(bus)
        await until(lambda: len(one.assigned) == 2, "the first has its new assignment")
        before = await bus.committed("g", "work")
        await one.consumer.commit({part: Committed(0) for part in one.consumer.assignment()})
        await one.close()
        await two.close()

        assert ({}, 1) == (before, len(one.refused))
        assert "a rebalance is under way" in one.refused[0]

    async def test_a_member_is_told_where_each_partition_starts(self, kit: Kit) -> None:
        """At the committed offset with its text, or at the earliest one."""
        first = await kit.bus.join(["work"], "g")
        await first.commit({TopicPartition("work", 0): Committed(0, "mine")})
        await first.close()
        await fill(kit.bus, "work", 3, partition=1)
        await kit.trim(TopicPartition("work", 1), 2)
        member = await Member().join(kit.bus)
        await member.close()

        assert {part.partition: start for part, start in member.starts[0].items()} == {
            0: Committed(0, "mine"),
            1: Committed(2),
            2: Committed(0),
            3: Committed(0),
        }

    async def test_kept_partitions_go_on_where_their_member_says(self, bus: Bus) -> None:
        """What it is still working on need not be handed out again."""
        await fill(bus, "work", 12, partition=None)
        one = await Member().join(bus)
        await until(lambda: len(one.found) == 12, "the first got everything")
        one.go_on = dict.fromkeys(ALL, 3)
        two = await Member().join(bus)
        await until(lambda: len(two.found) == 6, "the second got its share again")
        kept = next(iter(one.consumer.assignment()))
        await bus.publish("work", b"next", partition=kept.partition)
        await until(lambda: len(one.found) > 12, "the first got the next record")
        again = one.found[12:]
        await one.close()
        await two.close()

        assert [(record.tp, record.offset) for record in again] == [(kept, 3)]

    async def test_a_commit_for_another_members_partition_is_refused(self, bus: Bus) -> None:
        """NotOwner, and the group's progress stays as it was."""
        one = await Member().join(bus)
        two = await Member().join(bus)
        await until(lambda: len(one.revoked) == 1, "the first lost half")
        (foreign, *_) = two.consumer.assignment()
        await two.consumer.commit({foreign: Committed(0, "mine")})
        with pytest.raises(NotOwner):
            await one.consumer.commit({foreign: Committed(0, "late")})
        progress = await bus.committed("g", "work")
        await one.close()
        await two.close()

        assert progress == {foreign.partition: Committed(0, "mine")}

    async def test_a_member_whose_session_ran_out_cannot_commit(self, kit: Kit) -> None:
        """A zombie learns by NotOwner that its partitions went to another."""
        zombie = await Member().join(kit.bus)
        await zombie.stop_polling()
        await kit.expel(zombie.consumer)
        heir = await Member().join(kit.bus)
        with pytest.raises(NotOwner):
            await zombie.consumer.commit(dict.fromkeys(ALL, Committed(0, "late")))
        inherited = heir.consumer.assignment()
        await heir.close()
        await zombie.close()

        assert inherited == ALL

    async def test_nothing_is_handed_out_before_on_assigned_has_returned(self, bus: Bus) -> None:
        """What the callback restores is in place when the first record comes."""
        await fill(bus, "one", 3)
        order: list[str] = []
        restored = asyncio.Event()

        async def restore(_: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int]:
            order.append("assigned")
            await restored.wait()
            order.append("restored")
            return {}

        joining = asyncio.create_task(bus.join(["one"], "g", Listener(on_assigned=restore)))
        await until(lambda: order == ["assigned"], "the callback was called")
        assert not joining.done()
        restored.set()
        member = await joining
        await receive(member, 3)
        order.append("records")
        await member.close()

        assert order == ["assigned", "restored", "records"]

    async def test_an_error_of_a_callback_is_not_swallowed(self, bus: Bus) -> None:
        """A state that could not be restored stops the member instead of letting it work without."""

        async def fail(_: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int]:
            raise ValueError("no state")

        with pytest.raises(ValueError, match="no state"):
            member = await bus.join(["one"], "g", Listener(on_assigned=fail))
            await receive(member, 1)


class TestTime:
    async def test_offsets_are_found_by_time(self, bus: Bus) -> None:
        """The first record that is not older; the end where all are."""
        await fill(bus, "work", 3, partition=1)
        reader = await bus.read({TopicPartition("work", 1): 0})
        (first, *_) = await receive(reader, 3)
        await reader.close()

        assert await bus.offsets_since("work", 0) == {0: 0, 1: 0, 2: 0, 3: 0}
        assert (await bus.offsets_since("work", first.timestamp_ms))[1] == 0
        assert await bus.offsets_since("work", first.timestamp_ms + HOUR_MS) == {0: 0, 1: 3, 2: 0, 3: 0}
        assert (await bus.offsets_since("work", -5))[1] == 0


class TestTopics:
    async def test_existing_topics_are_left_alone(self, bus: Bus) -> None:
        """Only what is missing is made, and named."""
        assert await bus.create_topics([WORK, topic("more", 2)]) == ["more"]
        assert await bus.create_topics([WORK, topic("more", 2)]) == []

    async def test_a_fresh_topic_can_be_used_at_once(self, bus: Bus) -> None:
        """A topic is ready when `create_topics` returns."""
        await bus.create_topics([topic("fresh", 2)])

        assert (await bus.publish("fresh", b"v", partition=1)).offset == 0

    async def test_topics_as_in_the_table_pass(self, bus: Bus) -> None:
        """Nothing differs, nothing is raised."""
        await bus.check_topics([WORK, ONE, STATE])

    async def test_every_difference_is_named(self, bus: Bus) -> None:
        """Missing topics, partitions, retention, clean-up and size are all listed in one error."""
        wanted = [
            topic("absent", 1),
            replace(WORK, partitions=8, max_bytes=2_000_000),
            replace(ONE, retention_ms=5),
            replace(STATE, retention_ms=HOUR_MS),
        ]
        with pytest.raises(ConfigError) as caught:
            await bus.check_topics(wanted)
        lines = str(caught.value).splitlines()

        assert [line.split(":")[-1].strip() for line in lines[1:-1]] == [
            "missing",
            "partitions is 4, the table says 8",
            "max.message.bytes is 1048576, the table says 2000000",
            "retention.ms is 3600000, the table says 5",
            "cleanup.policy is compact, the table says delete",
            "retention.ms is None, the table says 3600000",
        ]
