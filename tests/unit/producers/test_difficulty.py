"""Rows are chosen by what they achieved: the same log gives the same choice, and a crash changes none."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from infra.clock import settle
from infra.errors import BusError
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from producers.difficulty import Difficulty, chance
from producers.feeder import Feeder
from producers.jsonl import JsonlSource
from producers.source import Instance
from schemas.control import Credit, Cursor, RunManifest
from schemas.decisions import DropReason, GroupDropped, RowSuccess, StepDecided, TrainerStarted
from schemas.partition import partition_for
from schemas.topics import CONTROL, DECISIONS, TABLE, TASKS
from tests.logs import read_all, wait_until

MANIFEST = RunManifest(run="r", seed=3, samples=2, paced=True)
ROWS = 5


@pytest.fixture
def source(tmp_path):
    """Five rows, passed again and again; they are lines 1 to 5."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f'{{"family": "toy", "payload": {{"n": {n}}}}}\n' for n in range(ROWS)))
    return JsonlSource(path, repeat=True)


async def decide(bus, clock, *decisions, run="r"):
    """Write decisions and return the offset of the last one."""
    publisher, part = Publisher(bus, clock, "trainer"), partition_for(run, DECISIONS.partitions)
    positions = [await publisher.publish(DECISIONS, decision, partition=part) for decision in decisions]
    return positions[-1].offset


def started(run="r"):
    return TrainerStarted(run=run, config={}, start=0, step=0)


def step(epoch=0, run="r", **success):
    """Return a decision by which rows achieved something: row1=0.5, ..."""
    rows = tuple(RowSuccess(row=int(name[3:]), success=value) for name, value in success.items())
    return StepDecided(run=run, epoch=epoch, step=1, position=1, members=(), digest="", advantage_digest="", rows=rows)


def drop(row, success, epoch=0):
    found = RowSuccess(row=row, success=success)
    reason = DropReason.NO_VARIANCE
    return GroupDropped(run="r", epoch=epoch, position=1, group=f"g{row}", reason=reason, members=(), row=found)


async def allow(bus, clock, groups, decided=-1):
    credit = Credit(run="r", epoch=0, admit_up_to=groups, min_version=0, horizon=8, temperature=1.0, decided=decided)
    await Publisher(bus, clock, "trainer").publish(CONTROL, credit)


async def fed(bus):
    """Return admission -> places (visit, row) that were published under it."""
    found = {}
    for record in await read_all(bus, TASKS):
        task = (await unpack(TASKS, record)).message
        found.setdefault(task.admission, set()).add((task.visit, task.row))
    return {number: found[number] for number in sorted(found)}


async def last_cursor(bus):
    records = [(await unpack(CONTROL, record)).message for record in await read_all(bus, CONTROL)]
    found = [record for record in records if isinstance(record, Cursor)]
    return found[-1] if found else None


async def admitted(bus):
    cursor = await last_cursor(bus)
    return 0 if cursor is None or cursor.taking else cursor.admitted


async def feed(bus, clock, source, groups, floor=0.01):
    """Let a feeder admit so many groups."""
    running = asyncio.create_task(Feeder(bus, clock, "r", source, floor=floor).run())
    await wait_until(lambda: admitted(bus), groups)
    await settle()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# ---- the chance of a row


def test_rows_that_say_nothing_new_have_the_floor_and_mixed_ones_are_certain():
    """Half solved is the most that a group can teach."""
    assert [chance(p, 0.1) for p in (0.0, 0.5, 1.0)] == [0.1, 1.0, 0.1]
    assert 0.1 < chance(0.9, 0.1) < chance(0.7, 0.1) < 1.0


async def test_rows_are_taken_as_often_as_their_chance_says(bus, clock):
    """The dice follow from seed, visit and row, so the same passes choose the same rows."""
    end = await decide(bus, clock, started(), step(row1=0.0, row2=0.5, row3=0.9))

    async def taken():
        rows = Difficulty(bus, clock, "r", seed=3, floor=0.1)
        places = [Instance(visit, row, "toy", {}) for visit in range(1, 401) for row in (1, 2, 3, 4)]
        return [(place.visit, place.row) for place in places if await rows.takes(place, end)]

    first = await taken()
    counts = Counter(row for _, row in first)
    assert (counts[2], counts[4]) == (400, 400)  # half solved, and never decided
    assert counts[1] == pytest.approx(40, abs=20)
    assert counts[3] == pytest.approx(400 * chance(0.9, 0.1), abs=40)
    assert first == await taken()


async def test_only_what_the_credit_names_is_known(bus, clock):
    """What was decided behind it counts once a credit comes that knows it; the last word of a row counts."""
    rows = Difficulty(bus, clock, "r", seed=3, floor=0.01)
    at = await decide(bus, clock, started(), step(row1=0.5))
    later = await decide(bus, clock, drop(1, 0.0))

    early = [await rows.takes(Instance(visit, 1, "toy", {}), at) for visit in range(1, 51)]
    late = [await rows.takes(Instance(visit, 1, "toy", {}), later) for visit in range(1, 51)]

    assert all(early)
    assert sum(late) <= 3


async def test_another_run_and_a_trainer_that_was_replaced_say_nothing(bus, clock):
    """Runs share partitions; what was written by an older epoch never counted."""
    other = next(name for name in map(str, range(999)) if partition_for(name, 8) == partition_for("r", 8))
    end = await decide(bus, clock, started(), started(), step(epoch=0, row1=0.0), step(epoch=1, run=other, row1=0.0))
    rows = Difficulty(bus, clock, "r", seed=3, floor=0.01)

    assert all([await rows.takes(Instance(visit, 1, "toy", {}), end) for visit in range(1, 51)])


# ---- the feeder


async def test_the_first_pass_is_whole_and_later_ones_leave_out_what_is_solved(bus, clock, source):
    """Numbers stay dense, and ids are those of the visit: nothing is published twice."""
    await Publisher(bus, clock, "trainer").publish(CONTROL, MANIFEST)
    solved = step(row1=1.0, row2=0.5, row3=0.0, row4=1.0, row5=0.5)
    end = await decide(bus, clock, started(), solved)
    await allow(bus, clock, 5)
    await feed(bus, clock, source, 5)
    await allow(bus, clock, 11, decided=end)
    await feed(bus, clock, source, 11)

    found = await fed(bus)
    assert list(found) == list(range(11))
    places = [place for number in found for place in found[number]]
    assert places[:5] == [(0, row) for row in range(1, 6)]
    assert places[5:] == [(visit, row) for visit in (1, 2, 3) for row in (2, 5)]
    assert (await last_cursor(bus)).passed > 11


class Dying(MemoryBus):
    """A log that takes so many records more, of tasks and control, and refuses the others until it is mended."""

    left = 10_000

    async def publish(self, topic, value, **where):
        if topic in {CONTROL.name, TASKS.name}:
            if not self.left:
                raise BusError("the feeder was killed here")
            self.left -= 1
        return await super().publish(topic, value, **where)


@pytest.mark.parametrize("records", range(1, 21))
async def test_a_feeder_that_was_killed_goes_on_with_what_it_had_chosen(clock, source, records):
    """Also if more is known by now: a number has one group, and no place is published under two."""
    bus = Dying(clock)
    await bus.create_topics(TABLE)
    await Publisher(bus, clock, "trainer").publish(CONTROL, MANIFEST)
    before = await decide(bus, clock, started(), step(row1=0.5, row2=0.5, row3=0.5, row4=0.5, row5=0.5))
    after = await decide(bus, clock, step(row1=0.0, row2=1.0, row3=0.0, row4=1.0))
    await allow(bus, clock, 9, decided=before)
    bus.left = records
    with pytest.raises(BusError, match="killed here"):
        await Feeder(bus, clock, "r", source, floor=0.01).run()
    bus.left = 10_000
    await allow(bus, clock, 9, decided=after)
    await feed(bus, clock, source, 9)

    found = await fed(bus)
    assert list(found) == list(range(9))
    assert all(len(places) == 1 for places in found.values())
    assert len(set.union(*found.values())) == 9


async def test_a_feeder_that_no_longer_chooses_goes_on_where_the_one_before_was(bus, clock, source):
    """Places that were passed are not published under another number."""
    await Publisher(bus, clock, "trainer").publish(CONTROL, MANIFEST)
    end = await decide(bus, clock, started(), step(row1=1.0, row2=0.5, row3=0.0, row4=1.0, row5=0.0))
    await allow(bus, clock, 8, decided=end)
    await feed(bus, clock, source, 8)
    await allow(bus, clock, 12, decided=end)
    await feed(bus, clock, source, 12, floor=None)

    found = await fed(bus)
    assert len(set.union(*found.values())) == 12
    last = [next(iter(found[number])) for number in range(8, 12)]
    assert [row for _, row in last] in ([3, 4, 5, 1], [2, 3, 4, 5], [1, 2, 3, 4], [4, 5, 1, 2], [5, 1, 2, 3])
