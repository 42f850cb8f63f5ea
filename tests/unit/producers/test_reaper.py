"""Every admitted sample gets a terminal record: the reaper ends those that nobody else ended in time."""

from __future__ import annotations

import asyncio
import math
import random
import tracemalloc
from contextlib import asynccontextmanager

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.blobs import KEEP_MS, BlobsAway
from infra.blobs.memory import MemoryBlobs
from infra.board.board import Board
from infra.board.feed import Feed, rebuild
from infra.bus import TopicPartition
from infra.claims import claimed
from infra.clock import settle
from infra.errors import BusError, WaitTimeout
from infra.memory import MemoryBus, MemoryReader
from infra.middleware.deadline import GRACE_S, LONGEST_S, reap_at_ms
from infra.outages import SILENT_MS
from infra.wire import Publisher, unpack
from producers import reaper
from producers.calendar import SECOND_MS
from producers.open_samples import OpenSamples
from producers.reaper import EARLIER_MS, Reaper
from schemas import codec
from schemas.arbiter import Arbiter, Ruling
from schemas.cancels import Cancels
from schemas.control import Breaker, Cancel, Credit, Outage, RunManifest
from schemas.messages import Budgets, Trajectory
from schemas.outcome import Cancelled, Completed, Expired
from schemas.partition import partition_for
from schemas.telemetry import EventKind, StageEvent
from schemas.topics import CONTROL, STAGE_MS, TABLE, TASKS, TRAJECTORIES
from tests.logs import make_task, read_all

BUDGETS = Budgets(init_s=10, run_s=20, eval_s=30)
POISON = b"\xc1 not msgpack"
DONE = Completed(components={}, reward=0.0, success=0.0, truncated=False)


def open_task(sample, start_by_ms, **changes):
    return make_task(sample=sample, start_by_ms=start_by_ms, budgets=BUDGETS, **changes)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 5), st.integers(0, 5_000)),
        st.tuples(st.just("end"), st.integers(0, 5), st.none()),
        st.tuples(st.just("ask"), st.none(), st.integers(0, 120_000)),
        st.tuples(st.just("cancel"), st.integers(0, 5), st.none()),
        st.tuples(st.just("set aside"), st.integers(0, 5), st.none()),
        st.tuples(st.just("put back"), st.integers(0, 5), st.none()),
    ),
    max_size=40,
)


@given(operations=OPERATIONS)
def test_a_sample_is_given_up_once_and_only_when_it_is_open_and_overdue(operations):
    """In any order of tasks, outcomes, cancels and questions; an end before its task counts, a repeated task is one.

    What is set aside may have ended: it is given up only once it was put back.
    """
    samples, cancels = OpenSamples(), Cancels()
    due, ended, given_up, aside = {}, set(), set(), set()
    for what, sample, number in operations:
        if what == "admit":
            task = open_task(sample, number)
            samples.admit(task)
            if sample not in ended:
                due.setdefault(sample, reap_at_ms(task))
        elif what == "end":
            samples.end(make_task(sample=sample))
            ended.add(sample)
            due.pop(sample, None)
            aside.discard(sample)
        elif what in {"set aside", "put back"}:
            task = make_task(sample=sample)
            (samples.set_aside if what == "set aside" else samples.put_back)(task.id)
            (aside.add if what == "set aside" and sample not in ended else aside.discard)(sample)
        elif what == "cancel":
            target = f"test/g0/{sample}"
            cancels.put(target, Cancel(target=target, cause="by request"))
            found = [task.sample for task, _ in samples.withdrawn(cancels, only_new=False)]
            wanted = [sample for sample in due if f"test/g0/{sample}" in cancels and sample not in given_up | aside]
            assert sorted(found) == sorted(wanted)
            given_up.update(found)
            assert [] == samples.withdrawn(cancels, only_new=True)
        else:
            found = [task.sample for task in samples.overdue(number)]
            assert sorted(found) == sorted(
                sample for sample, at in due.items() if at <= number and sample not in given_up | aside
            )
            given_up.update(found)
        assert len(samples) == len(due)


def test_an_end_is_forgotten_once_the_sample_would_have_been_given_up():
    """Memory follows what is on its way: a run of any length needs no more."""
    samples = OpenSamples()
    for sample in range(10):
        task = open_task(sample, sample * 1_000)
        samples.end(task)
        samples.admit(task)

    assert (0, 10) == (len(samples), samples.remembered)
    assert [] == samples.overdue(reap_at_ms(open_task(4, 4_000)) + SECOND_MS)
    assert 5 == samples.remembered


def test_an_ended_sample_is_remembered_in_little_memory():
    """At a thousand ends a second there are tens of thousands of them, whatever their names are."""
    samples, ended = OpenSamples(), 10_000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for sample in range(ended):
        task = make_task(group=f"{'g' * 60}{sample}", start_by_ms=sample)
        samples.admit(task)
        samples.end(task)
    samples.withdrawn(Cancels(), only_new=True)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    assert (0, ended) == (len(samples), samples.remembered)
    assert held < 250 * ended


def test_the_end_of_a_sample_that_was_given_up_is_forgotten_too():
    """Its time is over when its record is read: there is nothing left to wait for."""
    samples = OpenSamples()
    task = open_task(0, 0)
    samples.admit(task)

    assert [task] == samples.overdue(reap_at_ms(task))

    samples.end(task)

    assert [] == samples.overdue(reap_at_ms(task) + SECOND_MS)
    assert (0, 0) == (len(samples), samples.remembered)


def test_a_samples_time_is_its_start_limit_all_budgets_and_a_grace():
    """Nothing that may still end by itself is reaped."""
    assert reap_at_ms(open_task(0, 5_000)) == 5_000 + int((60 + GRACE_S) * 1000)


@pytest.mark.parametrize("run_s", [math.inf, math.nan, -math.inf, 1e300])
def test_a_budget_that_is_no_time_does_not_stop_the_reaper(run_s):
    """A foreign producer may write any float; such a sample is given up when its task leaves the log."""
    task = make_task(start_by_ms=0, budgets=Budgets(run_s=run_s))

    assert reap_at_ms(task) == int(LONGEST_S * 1000)


class Log:
    """The log as a test of the reaper writes and reads it."""

    def __init__(self, bus, clock):
        self.bus, self.clock = bus, clock
        self._publisher = Publisher(bus, clock, "test")

    async def admit(self, *tasks):
        for task in tasks:
            await self._publisher.publish(TASKS, task)

    async def end(self, task):
        await self._publisher.publish(TRAJECTORIES, Trajectory(task=task, outcome=DONE, stage="eval"))

    async def away(self, since_ms, until_ms, *, worker="run-1", service="policy"):
        """Write that a worker found a service away."""
        outage = Outage(since_ms=since_ms, until_ms=until_ms)
        breaker = Breaker(
            service=service,
            address="http://here",
            stage="run",
            worker=worker,
            open=False,
            since_ms=since_ms,
            open_ms=until_ms - since_ms,
            outages=(outage,),
            at_ms=until_ms,
        )
        await self._publisher.publish(CONTROL, breaker)

    async def cancel(self, target):
        await self._publisher.publish(CONTROL, Cancel(target=target, cause="by request"))

    async def expired(self):
        """Return the samples with an expired record, in log order."""
        return await self.ended(Expired)

    async def ended(self, kind):
        """Return the samples with a record of one outcome, in log order."""
        records = [record for record in await read_all(self.bus, TRAJECTORIES) if record.value != POISON]
        found = [(await unpack(TRAJECTORIES, record)).message for record in records]
        return [trajectory.task.sample for trajectory in found if isinstance(trajectory.outcome, kind)]

    async def cancels(self):
        """Return the keys of the cancels in force."""
        state = {record.key: record.value for record in await read_all(self.bus, CONTROL)}
        return {key.decode() for key, value in state.items() if value is not None and key.startswith(b"cancel/")}

    async def advance(self, seconds):
        """Move time in the steps of the reaper's own polling, so that it acts on the way."""
        for _ in range(math.ceil(seconds / 5)):
            await self.clock.advance(5)


@pytest.fixture
async def log(bus, clock):
    """The log, with a reaper at work."""
    running = asyncio.create_task(Reaper(bus, clock).run())
    await settle()
    yield Log(bus, clock)
    assert not running.done(), running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_reaper_that_cannot_read_what_is_there_says_so(bus, clock):
    """It would look as if it watched: a broker that is away gives nothing, and no error either."""
    await Publisher(bus, clock, "test").publish(TASKS, open_task(0, clock.now_ms()))
    read = bus.read

    async def deaf(start):
        reader = await read(start)
        if len([tp for tp in start if tp.topic == TASKS.name]) == TASKS.partitions:

            async def nothing(limit, seconds):
                await clock.sleep(seconds)
                return ()

            reader.poll = nothing
        return reader

    bus.read = deaf
    running = asyncio.create_task(Reaper(bus, clock).run())
    await settle()
    for _ in range(70):
        await clock.advance(1.0)
    with pytest.raises(WaitTimeout, match=r"waited 60 s for more of tasks; partition .* is read up to 0 of 1"):
        await asyncio.wait_for(running, 5)


async def test_only_what_is_overdue_and_without_an_outcome_expires(log, clock):
    """One ended, one still has time, one is late at its start limit plus budgets plus grace."""
    now = clock.now_ms()
    late, ended, early = open_task(0, now), open_task(1, now), open_task(2, now + 60_000)
    await log.admit(late, ended, early)
    await log.end(ended)
    await log.advance(60 + GRACE_S - 5)
    before = await log.expired()
    await log.advance(10)
    then = await log.expired()
    await log.advance(60)

    assert ([], [0], [0, 2]) == (before, then, await log.expired())


async def test_a_sample_expires_once(log, clock):
    """Published twice, read again and again: one record."""
    task = open_task(0, clock.now_ms())
    await log.admit(task, task)
    await log.advance(200)

    assert await log.expired() == [0]


async def test_the_record_says_which_limit_ran_out(log, bus, clock):
    """For whoever asks why a sample has no reward."""
    await log.admit(open_task(0, clock.now_ms()))
    await log.advance(100)
    (record,) = await read_all(bus, TRAJECTORIES)
    trajectory = (await unpack(TRAJECTORIES, record)).message

    assert ("reaper", None) == (trajectory.stage, trajectory.transcript)
    assert "no outcome 30 s after its start limit and all stage budgets" in trajectory.outcome.cause


async def test_what_ended_before_the_reaper_started_is_not_reaped(bus, clock):
    """It reads the outcomes that are there before it gives anything up."""
    log = Log(bus, clock)
    old = clock.now_ms() - 10_000_000
    tasks = [open_task(sample, old) for sample in range(1200)]
    await log.admit(*tasks)
    for task in tasks[:-1]:
        await log.end(task)
    running = asyncio.create_task(Reaper(bus, clock).run())
    await settle(100)
    await log.advance(20)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert await log.expired() == [1199]


class Watched(MemoryBus):
    """A log that remembers from where it was read."""

    def __init__(self, clock, **options):
        super().__init__(clock, **options)
        self.starts = []

    async def read(self, start):
        self.starts.append(dict(start))
        return await super().read(start)


async def test_outcomes_from_before_the_first_task_that_is_left_are_not_read(clock):
    """They are kept for months with their transcripts; whose task has left the log needs no end any more."""
    bus = Watched(clock)
    await bus.create_topics(TABLE)
    log, home = Log(bus, clock), partition_for("test", TRAJECTORIES.partitions)
    for sample in range(5):
        await log.end(open_task(sample, clock.now_ms()))
    clock._start_ms += STAGE_MS
    ended, late = open_task(5, clock.now_ms()), open_task(6, clock.now_ms())
    await log.admit(ended, late)
    clock._start_ms += EARLIER_MS
    await log.end(ended)
    running = asyncio.create_task(Reaper(bus, clock).run())
    await settle(100)
    await log.advance(20)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (start,) = [start for start in bus.starts if TopicPartition(TRAJECTORIES.name, home) in start]

    assert 5 == start[TopicPartition(TRAJECTORIES.name, home)]
    assert [6] == await log.expired()


class DeafBlobs(MemoryBlobs):
    """A store that does not answer while `away` is set."""

    away = False

    async def get(self, digest):
        if self.away:
            raise BlobsAway("the disk is away")
        return await super().get(digest)


class LargeLog(Log):
    """A log whose values may be claim checks, with a reaper at work."""

    async def end_large(self, task):
        """End a sample with a transcript too large for the log, and return its blob's digest."""
        verdict = {"text": random.Random(task.sample).randbytes(1_200_000)}
        trajectory = Trajectory(task=task, outcome=DONE, verdict=verdict, stage="eval")
        await self._publisher.publish(TRAJECTORIES, trajectory)
        return claimed((await read_all(self.bus, TRAJECTORIES))[-1])

    async def expired(self):
        """Return the samples with an expired record, in log order."""
        records = [record for record in await read_all(self.bus, TRAJECTORIES) if claimed(record) is None]
        found = [(await unpack(TRAJECTORIES, record)).message for record in records]
        return [trajectory.task.sample for trajectory in found if isinstance(trajectory.outcome, Expired)]


@pytest.fixture
async def large_log(clock):
    """The log with a store for large values that can go away, and a reaper at work."""
    bus = MemoryBus(clock, blobs=DeafBlobs(clock))
    await bus.create_topics(TABLE)
    log = LargeLog(bus, clock)
    running = asyncio.create_task(Reaper(bus, clock).run())
    await settle()
    yield log
    assert not running.done(), running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_store_that_is_away_stops_nobody_else(large_log, clock):
    """All liveness rests on the reaper; whose task or end is in the store waits for it, and ends as it should then."""
    now, log = clock.now_ms(), large_log
    large = open_task(0, now, payload={"image": random.Random(0).randbytes(1_000_000)})
    ended = open_task(1, now)
    log.bus.blobs.away = True
    await log.admit(large, ended, open_task(2, now))
    await log.end_large(ended)
    await log.advance(60 + GRACE_S + 10)
    meanwhile = await log.expired()
    log.bus.blobs.away = False
    await log.advance(10)

    assert ([2], [2, 0]) == (meanwhile, await log.expired())


async def test_an_end_that_the_store_lost_is_none(large_log, clock):
    """Nobody can read it: without another one the group of the sample would never be complete."""
    now, log = clock.now_ms(), large_log
    lost, kept = open_task(0, now), open_task(1, now)
    log.bus.blobs.away = True
    await log.admit(lost, kept)
    log.bus.blobs.lose(await log.end_large(lost))
    await log.end_large(kept)
    await log.advance(60 + GRACE_S + 10)
    meanwhile = await log.expired()
    log.bus.blobs.away = False
    await log.advance(10)

    assert ([], [0]) == (meanwhile, await log.expired())


async def test_ends_in_the_store_hold_up_no_start(clock):
    """They name their sample outside: what is overdue ends before the first of them was opened."""
    bus = MemoryBus(clock, blobs=DeafBlobs(clock))
    await bus.create_topics(TABLE)
    log = LargeLog(bus, clock)
    old = clock.now_ms() - 10_000_000
    await log.admit(*(open_task(sample, old) for sample in range(3)))
    for sample in range(2):
        await log.end_large(open_task(sample, old))
    bus.blobs.away = True
    running = asyncio.create_task(Reaper(bus, clock).run())
    await settle(100)
    await log.advance(10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert [2] == await log.expired()


async def test_two_reapers_agree_by_the_log(bus, clock):
    """Both may write; the first record counts and the second is superseded."""
    log = Log(bus, clock)
    running = [asyncio.create_task(Reaper(bus, clock).run()) for _ in range(2)]
    await settle()
    task = open_task(0, clock.now_ms())
    await log.admit(task)
    await log.advance(100)
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    arbiter = Arbiter()
    rulings = [
        arbiter.rule(task.group, task.sample, task.payload_digest, record.offset)
        for record in await read_all(bus, TRAJECTORIES)
    ]

    assert Ruling.ACCEPTED is rulings[0]
    assert rulings.count(Ruling.ACCEPTED) == 1


async def test_bytes_that_cannot_be_read_are_skipped(log, bus, clock):
    """Their stage buries them; the reaper goes on, an endless budget included."""
    await bus.publish(TASKS.name, POISON, partition=0)
    await bus.publish(TRAJECTORIES.name, POISON, partition=0)
    await log.admit(make_task(sample=3, budgets=Budgets(run_s=math.inf)), open_task(4, clock.now_ms()))
    await log.advance(100)

    assert await log.expired() == [4]


async def test_a_task_at_the_limit_of_the_log_is_given_up_like_any_other(log, bus, clock):
    """Its terminal record fits, whatever a foreign producer published."""
    huge = open_task(5, clock.now_ms(), payload={"image": random.Random(0).randbytes(950_000)})
    await bus.publish(TASKS.name, codec.encode(huge), partition=0)
    await log.advance(100)

    assert await log.expired() == [5]


def test_a_sample_is_given_the_time_that_a_service_was_away_since_its_publication():
    """Not what was before; and what goes on is looked at again."""
    task = open_task(0, 1_000)
    due_ms = reap_at_ms(task)
    away = {0: 500, 400: 300}
    early, late = OpenSamples(), OpenSamples()
    early.admit(task, published_ms=0)
    late.admit(task, published_ms=400)

    assert [[], []] == [early.overdue(due_ms + 299, away.get), late.overdue(due_ms + 299, away.get)]
    assert [[], [task]] == [early.overdue(due_ms + 300, away.get), late.overdue(due_ms + 300, away.get)]
    away[0] = 90_000
    assert [] == early.overdue(due_ms + 500, away.get)
    assert [task] == early.overdue(due_ms + 90_000, away.get)


async def test_an_outage_postpones_the_end_of_what_was_on_its_way(log, clock):
    """Two workers say the same, another service was away at the same time: that time counts once."""
    now = clock.now_ms()
    await log.admit(open_task(0, now))
    await log.advance(20)
    for worker, service in (("run-1", "policy"), ("run-2", "policy"), ("run-1", "envhost")):
        await log.away(now + 5_000, now + 45_000, worker=worker, service=service)
    await log.admit(open_task(1, now))
    await log.advance(60 + GRACE_S + 5 - 20)
    first = await log.expired()
    await log.advance(25)
    then = await log.expired()
    await log.advance(20)

    # The one was on its way for all 40 s of the outage, the other for the last 25 s.
    assert ([], [1], [1, 0]) == (first, then, await log.expired())


async def test_a_reaper_that_starts_during_an_outage_knows_of_it(bus, clock):
    """It reads `control` before it gives anything up."""
    log = Log(bus, clock)
    now = clock.now_ms()
    await log.admit(open_task(0, now))
    await clock.advance(200)
    await log.away(now + 1_000, now + 190_000)
    running = asyncio.create_task(Reaper(bus, clock).run())
    await settle(100)
    await log.advance(10)
    before = await log.expired()
    await log.advance(120)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert ([], [0]) == (before, await log.expired())


async def test_queued_samples_of_a_target_are_cancelled_at_once(log, clock):
    """No deadline is waited for; what has an outcome keeps it, and nobody else is touched."""
    now = clock.now_ms()
    for sample in range(4):
        await log.admit(open_task(sample, now))
    await log.admit(open_task(8, now, group="g1"))
    await log.end(open_task(0, now))
    await log.advance(5)
    await log.cancel("test/g0")
    await log.advance(5)
    cancelled = await log.ended(Cancelled)
    await log.advance(100)

    assert ([1, 2, 3], [8]) == (sorted(cancelled), await log.expired())
    assert [1, 2, 3] == sorted(await log.ended(Cancelled))


async def test_what_it_ends_is_said_for_whoever_believes_it_in_a_stage(log, bus, clock):
    """A worker that was killed says nothing more; the board lets go of its sample all the same."""
    now = clock.now_ms()
    await log.admit(open_task(1, now), open_task(2, now))
    feed = Feed(Board(), bus, clock)
    for sample in (1, 2):
        feed.board.take(
            StageEvent(
                run="test", group="g0", sample=sample, attempt=1, stage="run", kind=EventKind.STARTED, at_ms=now
            ),
            "run-1",
            now,
        )
    await log.cancel("test/g0/2")
    await log.advance(100)
    await rebuild(feed, bus, clock)
    view = feed.view()

    assert {"cancelled": 1, "expired": 1} == view.states
    assert [0, 0, 0, 0] == [stage.in_flight for stage in view.stages]
    assert {"cancelled": 1, "expired": 1} == view.stages[-1].counts["1h"]
    assert "no outcome" in feed.sample("test", "g0", "1").stays[-1].detail


async def test_what_is_admitted_after_the_cancel_is_cancelled_too(log, clock):
    """A cancel is a state. One of another run goes on."""
    await log.cancel("test")
    await log.admit(open_task(1, clock.now_ms()), open_task(2, clock.now_ms(), run="other"))
    await log.advance(5)
    first = await log.ended(Cancelled)
    await log.admit(open_task(3, clock.now_ms()))
    await log.advance(5)

    assert ([1], [1, 3]) == (first, await log.ended(Cancelled))


async def test_a_cancel_that_was_there_before_the_reaper_is_carried_out(bus, clock):
    """It was down when the cancel came."""
    log = Log(bus, clock)
    await log.admit(*(open_task(sample, clock.now_ms()) for sample in range(600)))
    await log.cancel("test")
    running = asyncio.create_task(Reaper(bus, clock).run())
    await settle(200)
    await log.advance(20)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert list(range(600)) == sorted(await log.ended(Cancelled))


async def test_a_cancel_is_removed_after_the_runs_last_deadline(log, clock):
    """Until then it covers whatever may still come to a stage."""
    now = clock.now_ms()
    await log.admit(open_task(0, now), open_task(1, now + 60_000), open_task(2, now + 500_000, run="other"))
    await log.cancel("test/g0/0")
    await log.cancel("other")
    await log.advance(60 + GRACE_S + 50)
    before = await log.cancels()
    await log.advance(20)

    assert ({"cancel/test/g0/0", "cancel/other"}, {"cancel/other"}) == (before, await log.cancels())


async def test_an_outage_puts_off_the_end_of_a_cancel_as_it_does_the_deadlines(log, clock):
    """What stood still meanwhile may still come to a stage."""
    now = clock.now_ms()
    await log.admit(open_task(0, now))
    await log.away(now, now + 40_000)
    await log.cancel("test")
    await log.advance(60 + GRACE_S + 30)
    before = await log.cancels()
    await log.advance(20)

    assert ({"cancel/test"}, set()) == (before, await log.cancels())


async def test_many_cancels_cost_one_look_at_the_outages(log, clock, monkeypatch):
    """Somebody withdraws a thousand samples one by one: each is asked about twice a second."""
    asked = []

    def away_ms(*_):
        asked.append(clock.monotonic())
        return 0

    monkeypatch.setattr(reaper, "away_ms", away_ms)
    for sample in range(20):
        await log.cancel(f"test/g0/{sample}")
    await clock.advance(1)
    asked.clear()
    await clock.advance(10 * reaper.POLL_S)

    assert 1 <= len(asked) <= 11


async def test_a_cancel_of_a_run_that_is_still_fed_stays(log, clock):
    """A feeder that starts again would go on; once the trainer has closed the run it is over."""
    publisher = Publisher(log.bus, clock, "test")
    credit = Credit(run="test", epoch=1, admit_up_to=5, min_version=0, horizon=1, temperature=1.0)
    await publisher.publish(CONTROL, RunManifest(run="test", seed=1, samples=1, paced=True))
    await publisher.publish(CONTROL, credit)
    await log.admit(open_task(0, clock.now_ms()))
    await log.cancel("test")
    await log.advance(60 + GRACE_S + 100)
    before = await log.cancels()
    await publisher.publish(CONTROL, msgspec.structs.replace(credit, closed=True))
    await log.advance(10)

    assert ({"cancel/test"}, set()) == (before, await log.cancels())


async def test_a_cancel_of_which_nothing_is_known_stays_as_long_as_a_task_may(log, clock):
    """Its tasks may have left the log, or are still to come."""
    await log.cancel("nowhere/g")
    await log.advance(200)
    before = await log.cancels()
    clock._start_ms += int(LONGEST_S * 1000)
    await log.advance(10)

    assert ({"cancel/nowhere/g"}, set()) == (before, await log.cancels())


async def test_a_reader_of_control_that_breaks_ends_the_reaper(bus, clock, monkeypatch):
    """It would let cancelled work wait for its deadline."""
    log = Log(bus, clock)
    await log.cancel("test")
    running = asyncio.create_task(Reaper(bus, clock).run())
    await settle()

    async def broken(*_):
        raise BusError("the reader broke")

    monkeypatch.setattr(MemoryReader, "poll", broken)
    await log.cancel("other")
    await clock.advance(1)

    with pytest.raises(BusError, match="the reader broke"):
        await asyncio.wait_for(running, 10)


async def test_old_blobs_are_collected_at_the_start_and_then_regularly(bus, clock, monkeypatch, caplog):
    """What is pinned or young stays; one line says what went."""
    monkeypatch.setattr(reaper, "EVERY_S", 30.0)
    store, log = bus.blobs, Log(bus, clock)
    await store.put(b"old")
    pinned = await store.put(b"pinned")
    await store.pin("run", [pinned])
    clock._start_ms += KEEP_MS - 20_000
    await log.admit(open_task(0, clock.now_ms() + 1_000_000))
    with caplog.at_level("INFO", "producers.upkeep"):
        running = asyncio.create_task(Reaper(bus, clock).run())
        await settle(100)
        first = len(await store.stock())
        young = await store.put(b"young")
        await clock.advance(25)
        await log.admit(open_task(1, clock.now_ms() + 1_000_000))
        await clock.advance(10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert (2, {pinned, young}) == (first, {blob.digest for blob in await store.stock()})
    assert [
        "0 blobs collected, 0.0 MiB: older than 91 days and pinned by nobody",
        "1 blobs collected, 0.0 MiB: older than 91 days and pinned by nobody",
    ] == caplog.messages


class AwayBlobs(MemoryBlobs):
    """A store whose collections fail until told otherwise."""

    away = True

    async def collect(self, keep_ms=KEEP_MS):
        if self.away:
            raise BlobsAway("not mounted")
        return await super().collect(keep_ms)


async def test_a_store_that_is_away_stops_no_reaper(bus, clock, monkeypatch):
    """It is asked again in the next round."""
    monkeypatch.setattr(reaper, "EVERY_S", 30.0)
    bus.blobs = store = AwayBlobs(clock)
    log = Log(bus, clock)
    await store.put(b"old")
    clock._start_ms += KEEP_MS + 1_000
    running = asyncio.create_task(Reaper(bus, clock).run())
    await settle()
    await log.admit(open_task(0, clock.now_ms()))
    await log.advance(100)
    assert ([0], 1) == (await log.expired(), len(await store.stock()))
    store.away = False
    await log.advance(60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert [] == await store.stock()


@asynccontextmanager
async def at_work(one, clock):
    """A reaper that starts now and has taken what there is."""
    running = asyncio.create_task(one.run())
    await settle(100)
    await clock.advance(1)
    try:
        yield
        assert not running.done(), running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def workers(bus):
    """Return the workers of whose outages `control` knows."""
    state = {record.key.decode(): record.value for record in await read_all(bus, CONTROL)}
    return {key.split("/")[-1] for key, value in state.items() if value is not None and key.startswith("breaker/")}


async def test_what_a_worker_wrote_of_outages_is_removed_after_a_day(bus, clock):
    """Whether it has gone or not: it would say so again. What was written since stays."""
    log = Log(bus, clock)
    now = clock.now_ms()
    await log.away(now - 60_000, now - 30_000, worker="gone")
    await log.away(now - 60_000, now, worker="late")
    clock._start_ms += SILENT_MS - 10_000
    async with at_work(Reaper(bus, clock), clock):
        found = await workers(bus)

    assert {"late"} == found


@pytest.mark.parametrize("waits", ["an open sample", "a cancel"])
async def test_an_outage_is_not_forgotten_while_anything_began_before_its_end(bus, clock, waits):
    """The time of what is on its way would shrink."""
    log = Log(bus, clock)
    now = clock.now_ms()
    if waits == "a cancel":
        await log.cancel("test")
    else:
        await log.admit(open_task(0, now + 10 * SILENT_MS))
    await clock.advance(60)
    await log.away(now - 90_000, now, worker="before")
    await log.away(now + 10_000, now + 30_000, worker="since")
    clock._start_ms += 2 * SILENT_MS
    async with at_work(Reaper(bus, clock), clock):
        found = await workers(bus)

    assert {"since"} == found


async def test_a_removed_outage_takes_no_time_from_an_open_sample(bus, clock):
    """Only the one that it depended on counts when its end comes."""
    log = Log(bus, clock)
    now = clock.now_ms()
    await log.away(now - 90_000, now, worker="before")
    await clock.advance(5)
    task = open_task(0, now + 2 * SILENT_MS)
    await log.admit(task)
    await log.away(now + 10_000, now + 50_000, worker="since")
    clock._start_ms += reap_at_ms(task) + 30_000 - clock.now_ms()
    async with at_work(Reaper(bus, clock), clock):
        await log.advance(1)
        before, left = await log.expired(), await workers(bus)
        await log.advance(10)

    assert ([], {"since"}, [0]) == (before, left, await log.expired())


class Behind(Reaper):
    """A reaper to which more tasks come than it reads."""

    behind = True

    async def _caught_up(self, topic, reader):
        return not self.behind and await super()._caught_up(topic, reader)


async def test_outages_are_not_forgotten_by_a_reaper_that_is_behind(bus, clock, monkeypatch):
    """A task that it has not read yet may depend on them; it looks again later."""
    monkeypatch.setattr(reaper, "EVERY_S", 30.0)
    log = Log(bus, clock)
    await log.away(clock.now_ms() - 60_000, clock.now_ms(), worker="gone")
    clock._start_ms += 2 * SILENT_MS
    late = Behind(bus, clock)
    async with at_work(late, clock):
        before = await workers(bus)
        late.behind = False
        await log.advance(40)
        then = await workers(bus)

    assert ({"gone"}, set()) == (before, then)
