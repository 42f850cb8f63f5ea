"""What `infra/bus.py` promises in a rebalance, held against every implementation."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import pytest
from bus_kit import ALL, Kit, fill, receive, until

from infra.bus import Bus, Committed, Consumer, Listener, Record, TopicPartition
from infra.errors import NotOwner


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
