"""Letters about records that took another task's id: one for each, however often they are found."""

from __future__ import annotations

import pytest

from infra.bus import Record, TopicPartition
from infra.clickhouse.conflicts import Conflict, ConflictLetters
from infra.clock import VirtualClock
from infra.dead_letter import POISON, DeadLetter, Death, bury
from infra.memory import MemoryBus
from producers.redrive import NotRedrivable, work_of
from rollmill.graveyard import Wanted, newest
from schemas.topics import DEAD, TABLE, TRAJECTORIES
from tests.logs import read_all

PART = TopicPartition(TRAJECTORIES.name, 3)


@pytest.fixture
async def bus():
    """A log with ten records in one partition of `trajectories`."""
    log = MemoryBus(VirtualClock())
    await log.create_topics(TABLE)
    for number in range(10):
        await log.publish(PART.topic, b"outcome %d" % number, key=b"g", partition=PART.partition)
        await log.clock.advance(60)
    return log


def letters_of(bus):
    return ConflictLetters(bus, bus.clock, "sink")


def conflicts(*offsets):
    return [Conflict(offset=offset, run="r", group="g", digest="new", taken_by="old", taken_at=0) for offset in offsets]


async def dead(bus):
    return [DeadLetter(record) for record in await read_all(bus, DEAD)]


async def test_a_letter_holds_the_record_and_names_both_tasks(bus):
    """Whoever reads it sees whose id was taken, and by what."""
    assert 2 == await letters_of(bus).bury(PART, conflicts(4, 7))
    found = await dead(bus)

    assert [(4, b"outcome 4"), (7, b"outcome 7")] == [(one.original.offset, one.original.value) for one in found]
    assert [("conflict", "sink")] * 2 == [(one.death.kind, one.death.stage) for one in found]
    assert all(word in found[0].death.cause for word in ("r/g", "digest old", "offset 0", "digest new", "of its own"))


async def test_the_command_lists_it_by_its_kind(bus):
    """As every other letter, `rollmill dead list --kind conflict`."""
    await letters_of(bus).bury(PART, conflicts(4))
    (line,) = await newest(bus, bus.clock, Wanted(kind="conflict"), 5)

    assert ("conflict", "sink", "trajectories") == (line.kind, line.stage, line.topic)


async def test_what_has_its_letter_gets_no_other(bus):
    """The range is stored again by the same sink, by the next one, or in part."""
    first = letters_of(bus)
    await first.bury(PART, conflicts(4, 7))

    assert [0, 0, 1] == [
        await letters.bury(PART, found)
        for letters, found in (
            (first, conflicts(4, 7)),
            (letters_of(bus), conflicts(4, 7)),
            (letters_of(bus), conflicts(4, 7, 8)),
        )
    ]
    assert [4, 7, 8] == [one.original.offset for one in await dead(bus)]


async def test_a_partition_that_was_away_is_looked_at_anew(bus):
    """Its owner of the meantime wrote letters too."""
    first, second = letters_of(bus), letters_of(bus)
    await first.bury(PART, conflicts(4))
    first.forget({PART})
    await second.bury(PART, conflicts(7))

    assert [0, 1] == [await first.bury(PART, conflicts(7)), await first.bury(PART, conflicts(8))]


async def test_letters_of_other_causes_and_places_do_not_count(bus):
    """The same offset of another partition, and the same record as poison."""
    for partition, death in ((PART.partition, Death(stage="sink", cause="", kind=POISON)), (2, None)):
        record = Record(PART.topic, partition, 4, bus.clock.now_ms(), None, b"")
        await bury(bus, bus.clock, record, death or Death(stage="sink", cause="", kind="conflict"))

    assert 1 == await letters_of(bus).bury(PART, conflicts(4))


async def test_a_record_that_left_the_log_has_no_letter(bus):
    """The others have theirs."""
    bus.log.trim(PART, 5)

    assert [1, 0] == [await letters_of(bus).bury(PART, found) for found in (conflicts(4, 7), conflicts(3))]
    assert [7] == [one.original.offset for one in await dead(bus)]


async def test_a_conflict_is_not_done_again(bus):
    """Under its id it would be one again."""
    await letters_of(bus).bury(PART, conflicts(4))
    (letter,) = await dead(bus)

    with pytest.raises(NotRedrivable, match="id belongs to another task"):
        await work_of(letter)
