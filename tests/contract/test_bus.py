"""What `infra/bus.py` promises of records, times and topics, held against every implementation."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace

import pytest
from bus_kit import ONE, STATE, WAIT_S, WORK, Kit, fill, follow, receive, topic

from infra.bus import Bus, TopicPartition
from infra.errors import BusError, ConfigError, OffsetLost
from schemas.topics import HOUR_MS


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
