"""The public reader: each outcome once, each group once, and a place to go on from, whatever came twice or late."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import subprocess
import sys

import pytest

from infra.blobs import BlobsAway
from infra.blobs.memory import MemoryBlobs
from infra.bus import Committed, TopicPartition
from infra.clock import VirtualClock, settle
from infra.errors import BusError, ConfigError, OffsetLost, WaitTimeout
from infra.memory import MemoryBus
from infra.trajectories import (
    AWAY_S,
    OUTAGE_S,
    POLL_S,
    SAY_EVERY_S,
    SILENCE_S,
    ReaderReplaced,
    TrajectoryReader,
    trajectories_of,
)
from infra.wire import Publisher
from schemas.control import RunManifest
from schemas.messages import Trajectory
from schemas.outcome import Completed, Expired
from schemas.topics import CONTROL, TABLE, TRAJECTORIES
from tests.logs import make_task

RUN = "r"
PARTITION = trajectories_of(RUN).partition
NEIGHBOUR = next(name for name in map(str, range(100)) if trajectories_of(name).partition == PARTITION)
DONE = Completed(components={}, reward=1.0, success=1.0, truncated=False)


@pytest.fixture
def clock():
    """Time that only the test moves."""
    return VirtualClock()


@pytest.fixture
async def bus(clock):
    """A log with all topics, on that clock."""
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    return bus


@pytest.fixture
def end(bus, clock):
    """Publish the end of a sample of a group of two."""
    publisher = Publisher(bus, clock, "test")

    async def end(group, sample, outcome=DONE, **changes):
        task = make_task(**{"run": RUN, "group": group, "sample": sample, "samples": 2, **changes})
        await publisher.publish(TRAJECTORIES, Trajectory(task=task, outcome=outcome, stage="eval"))

    return end


async def two_groups(end):
    """Publish two groups whose ends are mixed, with what is to be ignored between them; the second needs offset 1.

    0 a/0, 1 b/0, 2 a/0 again, 3 another run's, 4 a/1: a is complete, 5 a/0 late, 6 b/1: b is complete, 7 c/0.
    """
    await end("a", 0)
    await end("b", 0)
    await end("a", 0, Expired(cause="second"))
    await end("a", 0, run=NEIGHBOUR)
    await end("a", 1, Expired(cause="first"))
    await end("a", 0, attempt=1)
    await end("b", 1)
    await end("c", 0)


def reading(bus, clock, **options):
    return TrajectoryReader.on(bus, clock, RUN, **options)


async def groups(bus, clock, **options):
    """Return what a reader hands out of what is there."""
    async with reading(bus, clock, **options) as reader:
        return [group async for group in reader.groups(follow=False)]


async def progress(bus, consumer="me"):
    """Return (offset, position) of a consumer."""
    found = (await bus.committed(f"{consumer}.{RUN}", TRAJECTORIES.name))[PARTITION]
    return found.offset, json.loads(found.metadata)["position"]


async def test_groups_come_once_complete_with_siblings_in_order(bus, clock, end):
    """First records count; what came again is counted and ignored, other runs are not looked at."""
    await two_groups(end)
    async with reading(bus, clock) as reader:
        found = [group async for group in reader.groups(follow=False)]

        assert [("a", (0, 4), 5, 1), ("b", (1, 6), 7, 7)] == [(g.id, g.offsets, g.position, g.low) for g in found]
        assert [("a", 1, 1), ("b", 2, 0)] == [(g.id, len(g.graded), len(g.failed)) for g in found]
        assert Expired(cause="first") == found[0].failed[0].outcome
        assert (2, 0, 8, 7, 1) == (
            reader.superseded,
            reader.conflicts,
            reader.position,
            reader.low,
            reader.open_groups,
        )


async def test_outcomes_can_be_had_one_by_one(bus, clock, end):
    """Each sample once, in log order, whether its group is complete or not."""
    await two_groups(end)
    await end("c", 1, payload={"another": "task"})
    async with reading(bus, clock) as reader:
        found = [(one.task.group, one.task.sample) async for one in reader.accepted(follow=False)]

        assert [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("c", 0)] == found
        assert (2, 1) == (reader.superseded, reader.conflicts)


async def test_a_run_is_followed_as_it_goes_on(bus, clock, end):
    """A group comes when its last sibling does."""
    found = asyncio.Queue()

    async def read():
        async with reading(bus, clock) as reader:
            async for group in reader.groups():
                found.put_nowait(group.id)

    running = asyncio.create_task(read())
    await end("a", 0)
    await settle()
    early = found.qsize()
    await end("a", 1)

    assert (0, "a") == (early, await asyncio.wait_for(found.get(), 20))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_loop_that_was_left_goes_on_where_it_was(bus, clock, end):
    """Nothing of the poll that was read is lost."""
    await two_groups(end)
    async with reading(bus, clock) as reader:
        async for group in reader.groups(follow=False):
            assert group.id == "a"
            break

        assert ["b"] == [group.id async for group in reader.groups(follow=False)]


async def test_bytes_that_are_no_trajectory_are_passed_over(bus, clock, end):
    """The sink has them in `dead`; the stream goes on."""
    await bus.publish(TRAJECTORIES.name, b"\xc1", partition=PARTITION)
    await two_groups(end)

    assert ["a", "b"] == [group.id for group in await groups(bus, clock)]


async def test_enough_graded_siblings_hand_a_group_out(bus, clock, end):
    """Declared, so that a straggler holds nothing up; it is counted as late."""
    await end("a", 0, Expired(cause="ungraded"), samples=3)
    await end("a", 2, samples=3)
    await end("a", 1, samples=3)
    async with reading(bus, clock, enough=1) as reader:
        (group,) = [group async for group in reader.groups(follow=False)]

        assert (False, 3, [0, 2]) == (group.complete, group.expected, [one.task.sample for one in group.samples])
        assert (1, 3, 0) == (reader.late, reader.position, reader.open_groups)


@pytest.mark.parametrize("enough", [None, 1])
@pytest.mark.parametrize("stop_after", range(1, 5))
async def test_a_consumer_that_starts_again_gets_the_rest(bus, clock, end, enough, stop_after):
    """No group is repeated and none is lost, wherever it stopped; late duplicates of old groups are no new ones."""
    await two_groups(end)
    await end("c", 1)
    await end("d", 0)
    await end("d", 1)
    whole = await groups(bus, clock, enough=enough)
    first = []
    async with reading(bus, clock, enough=enough, consumer="me") as reader:
        async for group in reader.groups():
            first.append(group)
            await reader.commit()
            if len(first) == stop_after:
                break
    rest = await groups(bus, clock, enough=enough, consumer="me")

    assert ["a", "b", "c", "d"] == sorted(group.id for group in whole)
    assert whole == first + rest


async def test_progress_can_be_stored_up_to_a_group(bus, clock, end):
    """What was handed out after it is handed out again."""
    await two_groups(end)
    async with reading(bus, clock, consumer="me") as reader:
        first, _ = [group async for group in reader.groups(follow=False)]
        await reader.commit(first)

    assert (1, 5) == await progress(bus)
    assert ["b"] == [group.id for group in await groups(bus, clock, consumer="me")]


async def test_single_outcomes_are_gone_on_with_too(bus, clock, end):
    """Of those, progress covers what was handed out."""
    await two_groups(end)
    async with reading(bus, clock, consumer="me") as reader:
        async for _ in reader.accepted():
            if reader.position == 5:
                break
        await reader.commit()
    async with reading(bus, clock, consumer="me") as reader:
        rest = [(one.task.group, one.task.sample) async for one in reader.accepted(follow=False)]

    assert [("b", 1), ("c", 0)] == rest


async def test_progress_never_goes_back(bus, clock, end):
    """A reader that is still reading the old part again has nothing new to store."""
    await two_groups(end)
    async with reading(bus, clock, consumer="me") as reader:
        _ = [group async for group in reader.groups(follow=False)]
        await reader.commit()
    before = await progress(bus)
    async with reading(bus, clock, consumer="me") as reader:
        await reader.commit()

    assert (7, 8) == before == await progress(bus)


async def test_consumers_and_runs_are_apart(bus, clock, end):
    """One name may read many runs, and one run may have many readers."""
    await two_groups(end)
    async with reading(bus, clock, consumer="me") as reader:
        _ = [group async for group in reader.groups(follow=False)]
        await reader.commit()

    assert ["a", "b"] == [group.id for group in await groups(bus, clock, consumer="you")]
    async with TrajectoryReader.on(bus, clock, NEIGHBOUR, consumer="me") as reader:
        assert [("a", 0)] == [(one.task.group, one.task.sample) async for one in reader.accepted(follow=False)]


async def test_of_two_readers_as_one_consumer_the_older_one_ends_at_its_next_commit(bus, clock, end):
    """Started twice by mistake: one goes on, the other one is told, and progress is of one hand."""
    await two_groups(end)
    async with reading(bus, clock, consumer="me") as older:
        async for _ in older.groups():
            break
        await older.commit()
        async with reading(bus, clock, consumer="me") as newer:
            async for group in older.groups():
                assert group.id == "b"
                break
            with pytest.raises(ReaderReplaced, match=r"as the same consumer \(Kafka group me.r, at offset 1\)"):
                await older.commit()

            assert ["b"] == [group.id async for group in newer.groups(follow=False)]
            await newer.commit()
    assert (7, 8) == await progress(bus)


class Between(MemoryBus):
    """A log in which something else happens right after progress was looked at or stored, once each."""

    looked = stored = None

    async def committed(self, group, topic):
        found = await super().committed(group, topic)
        then, self.looked = self.looked, None
        if then is not None:
            await then()
        return found

    async def commit(self, group, offsets):
        await super().commit(group, offsets)
        then, self.stored = self.stored, None
        if then is not None:
            await then()


@pytest.fixture
async def between(clock):
    """Such a log, with one group."""
    bus = Between(clock)
    await bus.create_topics(TABLE)
    made = Trajectory(task=make_task(run=RUN), outcome=DONE, stage="eval")
    await Publisher(bus, clock, "test").publish(TRAJECTORIES, made)
    return bus


async def test_a_reader_that_is_replaced_while_it_stores_learns_it_at_once(between, clock):
    """Kafka compares nothing when a group commits: the last to store wins, so each reads back what it stored."""
    newer = reading(between, clock, consumer="me")
    async with reading(between, clock, consumer="me") as older:
        _ = [group async for group in older.groups(follow=False)]
        between.stored = newer.__aenter__
        with pytest.raises(ReaderReplaced):
            await older.commit()
    await newer.__aexit__(None, None, None)


async def test_of_two_readers_one_goes_on_also_if_the_older_one_stores_last(between, clock):
    """It had looked before the newer one was there: then the newer one ends, by its own reading back."""
    newer = reading(between, clock, consumer="me")
    async with reading(between, clock, consumer="me") as older:
        _ = [group async for group in older.groups(follow=False)]
        looked, go_on = asyncio.Event(), asyncio.Event()

        async def pause():
            looked.set()
            await go_on.wait()

        between.looked = pause
        committing = asyncio.create_task(older.commit())
        await looked.wait()

        async def overtaken():
            go_on.set()
            await committing

        between.stored = overtaken
        with pytest.raises(ReaderReplaced):
            await newer.__aenter__()
        await older.commit()

    assert (1, 1) == await progress(between)


async def test_a_run_is_read_from_where_its_manifest_says_that_it_begins(bus, clock, end):
    """An earlier run of the same name is another's business; an offset that is given comes first."""
    await end("a", 0)
    await end("a", 1)
    manifest = RunManifest(run=RUN, seed=0, samples=2, trajectories_start=2)
    await Publisher(bus, clock, "test").publish(CONTROL, manifest)
    await end("b", 0)
    await end("b", 1)

    assert ["b"] == [group.id for group in await groups(bus, clock)]
    assert ["a", "b"] == [group.id for group in await groups(bus, clock, start=0)]


async def test_progress_under_another_rule_is_refused(bus, clock, end):
    """Which groups are left could not be told."""
    await two_groups(end)
    await groups(bus, clock, consumer="me")

    with pytest.raises(ConfigError, match=r"enough = None, now it is 1.*another `consumer`"):
        await groups(bus, clock, consumer="me", enough=1)


async def test_progress_beyond_the_end_of_the_log_is_refused(bus, clock, end):
    """Another log under the same name: waiting there would be silent for ever."""
    await two_groups(end)
    async with reading(bus, clock, consumer="me") as reader:
        _ = [group async for group in reader.groups(follow=False)]
        await reader.commit()
    known = await bus.committed(f"me.{RUN}", TRAJECTORIES.name)
    anew = MemoryBus(clock)
    await anew.create_topics(TABLE)
    await anew.commit(f"me.{RUN}", {trajectories_of(RUN): known[PARTITION]})

    with pytest.raises(ConfigError, match=r"has read up to offset 8, and .* ends at 0"):
        await groups(anew, clock, consumer="me")


async def test_progress_of_another_program_is_refused(bus, clock):
    """A Kafka group that something else uses is left alone."""
    await bus.commit(f"me.{RUN}", {trajectories_of(RUN): Committed(0, "theirs")})

    with pytest.raises(ConfigError, match=r"'theirs'.*another `consumer`"):
        await groups(bus, clock, consumer="me")


async def test_a_start_that_retention_removed_is_an_error(bus, clock, end):
    """Half a run would be no run."""
    await two_groups(end)
    await groups(bus, clock, consumer="me")
    bus.log.trim(TopicPartition(TRAJECTORIES.name, PARTITION), 3)

    with pytest.raises(OffsetLost, match="offset 0 of trajectories"):
        await groups(bus, clock, consumer="me")


async def test_what_cannot_work_is_refused(bus, clock, end):
    """With what to do instead."""
    await end("a", 0)
    with pytest.raises(ConfigError, match="enough = 0"):
        await groups(bus, clock, enough=0)
    async with reading(bus, clock) as reader:
        with pytest.raises(ConfigError, match="consumer=NAME"):
            await reader.commit()
        _ = [one async for one in reader.accepted(follow=False)]
        with pytest.raises(RuntimeError, match="not both"):
            _ = [group async for group in reader.groups(follow=False)]


class Away(MemoryBus):
    """A log whose readers fail while it is away."""

    away = deaf = False
    most = 1_000
    """Records that one poll brings at most."""

    async def read(self, start):
        reader = await super().read(start)
        reads = reader.poll

        async def poll(max_records, timeout_s):
            if self.away:
                raise BusError("the broker is away")
            return await reads(0 if self.deaf else min(max_records, self.most), timeout_s)

        reader.poll = poll
        return reader


async def started(bus, clock, **options):
    """Return a task that waits for the next group."""

    async def first():
        async with reading(bus, clock) as reader:
            async for group in reader.groups(**options):
                return group.id
        return None

    running = asyncio.create_task(first())
    await settle()
    return running


async def test_a_log_that_is_away_is_waited_for(clock, end):
    """A broker's restart costs a reader nothing."""
    bus = Away(clock)
    await bus.create_topics(TABLE)
    bus.away = True
    running = await started(bus, clock)
    await clock.advance(OUTAGE_S / 2)
    bus.away = False
    for sample in (0, 1):
        task = make_task(run=RUN, sample=sample, samples=2)
        await Publisher(bus, clock, "test").publish(TRAJECTORIES, Trajectory(task=task, outcome=DONE, stage="eval"))
    await clock.advance(AWAY_S + POLL_S)

    assert await asyncio.wait_for(running, 20) == "g0"


@pytest.mark.parametrize("follow", [True, False])
async def test_a_log_that_stays_away_is_given_up(clock, follow):
    """With its own error, after the same time whether the end is known or not: an outage is no silence."""
    bus = Away(clock)
    await bus.create_topics(TABLE)
    await bus.publish(TRAJECTORIES.name, b"\xc1", partition=PARTITION)
    bus.away = True
    running = await started(bus, clock, follow=follow)
    for _ in range(int(OUTAGE_S) - 5):
        await clock.advance(AWAY_S)
    assert not running.done()
    for _ in range(10):
        await clock.advance(AWAY_S)

    with pytest.raises(BusError, match="the broker is away"):
        await asyncio.wait_for(running, 20)


async def test_a_log_that_falls_silent_before_its_known_end_is_an_error(clock):
    """It says how far it came."""
    bus = Away(clock)
    await bus.create_topics(TABLE)
    await bus.publish(TRAJECTORIES.name, b"\xc1", partition=PARTITION)
    bus.deaf = True
    running = await started(bus, clock, follow=False)
    for _ in range(int(SILENCE_S / POLL_S) + 5):
        await clock.advance(POLL_S)

    with pytest.raises(WaitTimeout, match=r"for offset 1 of .*read up to 0"):
        await asyncio.wait_for(running, 20)


async def test_the_callers_own_time_is_no_silence_of_the_log(clock):
    """A step of training takes minutes; the first poll after it may well bring nothing."""
    bus = Away(clock)
    await bus.create_topics(TABLE)
    publisher = Publisher(bus, clock, "test")
    for group in ("a", "b"):
        task = make_task(run=RUN, group=group)
        await publisher.publish(TRAJECTORIES, Trajectory(task=task, outcome=DONE, stage="eval"))
    bus.most, found = 1, []
    async with reading(bus, clock) as reader:
        source = reader.groups(follow=False)
        found.append((await anext(source)).id)
        bus.deaf = True
        await clock.advance(2 * SILENCE_S)
        coming = asyncio.ensure_future(anext(source))
        await settle()
        await clock.advance(POLL_S)
        bus.deaf = False
        await clock.advance(POLL_S)
        found.append((await asyncio.wait_for(coming, 20)).id)

    assert ["a", "b"] == found


async def test_a_reader_that_waits_says_what_for(bus, clock, end, caplog):
    """A trainer may starve for many reasons; this is where to begin to look."""
    caplog.set_level(logging.INFO)
    await end("a", 0)
    running = await started(bus, clock)
    for _ in range(int(SAY_EVERY_S / POLL_S) + 2):
        await clock.advance(POLL_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert "nothing new behind offset 1 for 30 s; 1 groups are incomplete, the oldest since offset 0" in caplog.text


def test_a_reader_needs_no_torch_and_no_pydantic():
    """A foreign trainer brings its own torch, and none of our configuration."""
    code = "import sys; from rollmill import TrajectoryReader; print({'torch', 'pydantic', 'click'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)

    assert found.stdout.strip() == "set()"


class AwayBlobs(MemoryBlobs):
    """A store that does not answer while `away` is set."""

    away = False

    async def get(self, digest):
        if self.away:
            raise BlobsAway("the disk is away")
        return await super().get(digest)


async def large_and_small(clock, blobs):
    """Return a log with an outcome whose value lies in the store, and one behind it."""
    bus = MemoryBus(clock, blobs=blobs)
    await bus.create_topics(TABLE)
    for sample, verdict in enumerate(({"text": random.Random(0).randbytes(1_200_000)}, {})):
        task = make_task(run=RUN, sample=sample, samples=2)
        made = Trajectory(task=task, outcome=DONE, verdict=verdict, stage="eval")
        await Publisher(bus, clock, "test").publish(TRAJECTORIES, made)
    return bus


async def test_a_value_that_is_away_is_waited_for_and_keeps_its_place(clock):
    """The store of large values is part of the log: while it does not answer, nothing is passed over."""
    blobs = AwayBlobs(clock)
    bus = await large_and_small(clock, blobs)
    blobs.away = True
    running = await started(bus, clock)
    async with reading(bus, clock) as reader:
        polling = asyncio.create_task(reader.poll())
        await settle()
        await clock.advance(AWAY_S)
        early = await asyncio.wait_for(polling, 20)
        blobs.away = False
        then = await reader.poll()
    await clock.advance(AWAY_S)

    assert ([], [0, 1]) == (early, [one.task.sample for one in then])
    assert await asyncio.wait_for(running, 20) == "g0"


async def test_a_store_that_stays_away_or_that_nobody_named_is_an_error(clock):
    """The first after its limit, the second at once, with what to set."""
    blobs = AwayBlobs(clock)
    bus = await large_and_small(clock, blobs)
    blobs.away = True
    running = await started(bus, clock)
    for _ in range(int(OUTAGE_S) + 5):
        await clock.advance(AWAY_S)
    with pytest.raises(BlobsAway, match="the disk is away"):
        await asyncio.wait_for(running, 20)
    bus.blobs = None
    with pytest.raises(BlobsAway, match=r"there is no store: set bus\.blobs"):
        await groups(bus, clock)
