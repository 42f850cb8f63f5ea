"""Finding dead letters: the newest of some sort, one by its id, all in turn."""

from __future__ import annotations

import random

import pytest

from infra.bus import Record, TopicPartition
from infra.clock import VirtualClock
from infra.dead_letter import Death, bury
from infra.errors import ConfigError
from infra.memory import MemoryBus
from rollmill import graveyard
from rollmill.graveyard import Wanted, letter_at, letters, newest
from schemas import codec
from schemas.topics import DEAD, TABLE
from tests.logs import make_task

T0 = 1_700_000_000_000


@pytest.fixture
async def bus():
    bus = MemoryBus(VirtualClock(T0))
    await bus.create_topics(TABLE)
    return bus


async def lay(bus, partition, *, kind="engine", run="r", sample=0, value=b"\xc1"):
    """Bury something, one second after what was buried before."""
    await bus.clock.advance(1)
    headers = (("ce_subject", f"{run}/g/{sample}".encode()),) if run else ()
    record = Record("tasks", partition, sample, 7, None, value, headers)
    await bury(bus, bus.clock, record, Death(stage="run", cause="gone", kind=kind))


async def test_the_newest_come_first_over_all_partitions(bus):
    """Each with what a person needs to tell them apart."""
    for number in range(6):
        await lay(bus, number % 3, sample=number)
    first, second = await newest(bus, bus.clock, Wanted(), 2)

    assert ("r/g/5", "2:1", "tasks", "engine", "run", "gone") == (
        first.sample,
        first.id,
        first.topic,
        first.kind,
        first.stage,
        first.cause,
    )
    assert ("r/g/4", T0 + 5_000) == (second.sample, second.at_ms)


@pytest.mark.parametrize("seed", range(5))
async def test_reading_backwards_finds_what_reading_everything_finds(bus, seed, monkeypatch):
    """Whatever lies where, and however small the windows are."""
    monkeypatch.setattr(graveyard, "WINDOW", 3)
    dice = random.Random(seed)
    for number in range(60):
        await lay(bus, dice.choice([0, 0, 0, 1, 5]), kind=dice.choice(["engine", "poison"]), sample=number)
    for wanted in (Wanted(), Wanted(kind="poison"), Wanted(since_ms=T0 + 40_000), Wanted(run="none")):
        every = [one async for one in letters(bus, bus.clock, wanted)]
        every.sort(key=lambda one: one.record.timestamp_ms, reverse=True)
        for limit in (1, 7, 100):
            found = await newest(bus, bus.clock, wanted, limit)
            assert [one.id for one in every[:limit]] == [line.id for line in found]


async def test_an_old_flood_is_not_read_for_the_newest(bus, monkeypatch):
    """Somebody looks at `dead` in the middle of an incident."""
    monkeypatch.setattr(graveyard, "WINDOW", 10)
    for number in range(500):
        await lay(bus, 0, kind="poison", sample=number)
    await lay(bus, 1)
    read = []

    async def counting(*arguments):
        async for record in read_between(*arguments):
            read.append(record)
            yield record

    read_between = graveyard.read_between
    monkeypatch.setattr(graveyard, "read_between", counting)
    found = await newest(bus, bus.clock, Wanted(), 3)

    assert ["1:0", "0:499", "0:498"] == [line.id for line in found]
    assert len(read) < 30


async def test_letters_are_chosen_by_run_kind_and_time(bus):
    """Of a run also what a foreign producer wrote without headers, as long as it can be read."""
    await lay(bus, 0, run="a", kind="engine")
    await lay(bus, 1, run="b", kind="engine")
    await lay(bus, 2, run="a", kind="poison")
    await lay(bus, 3, run="", value=codec.encode(make_task(run="a")))
    await lay(bus, 4, run="team/b", kind="engine")

    async def found(**wanted):
        return sorted([one.id async for one in letters(bus, bus.clock, Wanted(**wanted))])

    assert ["0:0", "2:0", "3:0"] == await found(run="a")
    assert ["2:0"] == await found(run="a", kind="poison")
    assert ["2:0", "3:0", "4:0"] == await found(since_ms=T0 + 3_000)
    assert [] == await found(run="ab")
    assert ["4:0"] == await found(run="team/b")


async def test_a_letter_is_found_by_its_id(bus):
    """And only where there is one."""
    await lay(bus, 3, sample=1)
    await lay(bus, 3, sample=2)

    assert "r/g/2" == await (await letter_at(bus, bus.clock, "3:1")).sample()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("3", "expected PARTITION:OFFSET"),
        ("3:x", "expected PARTITION:OFFSET"),
        ("3:\u00b2", "expected PARTITION:OFFSET"),
        ("-1:0", "expected PARTITION:OFFSET"),
        ("99:0", "`dead` has partitions 0 to 31"),
        ("3:0", "holds offsets 1 to 2"),
        ("3:2", "holds offsets 1 to 2"),
        ("4:0", "holds offsets 0 to 0"),
    ],
)
async def test_an_id_that_names_nothing_says_what_is_there(bus, name, says):
    """What retention removed is not there either."""
    await lay(bus, 3)
    await lay(bus, 3)
    bus.log.trim(TopicPartition(DEAD.name, 3), 1)

    with pytest.raises(ConfigError, match=says):
        await letter_at(bus, bus.clock, name)


async def test_nothing_is_dead(bus):
    """An empty topic is an empty list."""
    assert [] == await newest(bus, bus.clock, Wanted(), 10)
