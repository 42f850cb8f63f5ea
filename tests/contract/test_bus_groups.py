"""What `infra/bus.py` promises a member of a consumer group, held against every implementation."""

from __future__ import annotations

import asyncio
import time

import pytest
from bus_kit import ALL, WAIT_S, Kit, fill, follow, receive

from infra.bus import Bus, Committed, Record, TopicPartition
from infra.errors import BusError, NotOwner, OffsetLost


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
