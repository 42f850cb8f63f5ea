"""What is withdrawn, and the work that ends for it."""

from __future__ import annotations

import asyncio

import pytest

from infra.bus import Record, TopicPartition
from infra.cancellation import AGAIN_S, Cancellation
from infra.clock import VirtualClock, settle
from infra.errors import BusError, Failure
from infra.memory import MemoryBus
from infra.middleware import Job, Result
from infra.middleware.cancel import cancel as cancel_middleware
from infra.middleware.retry import retry
from infra.stage import Member, Stage
from infra.wire import Publisher, Received, unpack
from schemas.control import Cancel
from schemas.outcome import Boundary, Cancelled, FailureKind
from schemas.telemetry import EventKind
from schemas.topics import CONTROL, EPISODES, TABLE, TASKS, TRAJECTORIES
from tests.logs import make_task, read_all, wait_until


class FragileBus(MemoryBus):
    """A log whose readers break while `error` is set."""

    error: Exception | None = None

    async def read(self, start):
        reader = await super().read(start)
        poll = reader.poll

        async def may_break(max_records, timeout_s):
            if self.error is not None:
                raise self.error
            return await poll(max_records, timeout_s)

        reader.poll = may_break
        return reader


@pytest.fixture
async def bus():
    bus = FragileBus(VirtualClock())
    await bus.create_topics(TABLE)
    return bus


async def withdraw(bus, target, cause="by request"):
    await Publisher(bus, bus.clock, "test").publish(CONTROL, Cancel(target=target, cause=cause))
    await settle()


def job(**changes):
    task = make_task(run="r", group="g", **changes)
    return Job("run", Received(Record("episodes", 0, 5, 1000, None, b""), task, b""))


class Work:
    """A handler that waits until the test lets it go on."""

    def __init__(self):
        self.entered = self.stopped = 0
        self.gate = asyncio.Event()
        self.error = None

    async def __call__(self, _):
        self.entered += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        if self.error is not None:
            raise self.error
        return Result(EventKind.FINISHED)


@pytest.fixture
async def cancellation(bus):
    followed = Cancellation(bus, bus.clock)
    async with followed.following():
        yield followed


async def begun(cancellation, work, **changes):
    running = asyncio.create_task(cancel_middleware(cancellation)(work)(job(**changes)))
    await settle()
    return running


class TestMiddleware:
    """A withdrawn sample ends at once, and nothing else does."""

    async def test_what_is_withdrawn_before_it_is_taken_up_is_never_begun(self, bus, cancellation):
        """It ends as cancelled, with what was withdrawn and why."""
        await withdraw(bus, "r", "too slow")
        work = Work()
        result = await (await begun(cancellation, work))

        assert (0, EventKind.CANCELLED, TRAJECTORIES) == (work.entered, result.kind, result.output.topic)
        assert Cancelled(cause="cancel of r: too slow") == result.output.message.outcome
        assert "run" == result.output.message.stage

    @pytest.mark.parametrize("target", ["r", "r/g", "r/g/3"])
    async def test_what_is_in_work_is_stopped(self, bus, cancellation, target):
        """Whatever the withdrawal names; the task itself goes on to write the end."""
        work = Work()
        running = await begun(cancellation, work, sample=3)
        await withdraw(bus, target)
        result = await asyncio.wait_for(running, 5)

        assert (1, EventKind.CANCELLED) == (work.stopped, result.kind)
        assert not running.cancelled()

    async def test_siblings_go_on(self, bus, cancellation):
        """One sample of a group is withdrawn, the other ends by itself."""
        works = [Work(), Work()]
        running = [await begun(cancellation, work, sample=number) for number, work in enumerate(works)]
        await withdraw(bus, "r/g/1")
        works[0].gate.set()
        results = [await asyncio.wait_for(one, 5) for one in running]

        assert [EventKind.FINISHED, EventKind.CANCELLED] == [result.kind for result in results]

    async def test_a_stop_or_a_rebalance_stays_a_cancellation(self, cancellation):
        """Work that is taken away has no end here: another worker has it."""
        work = Work()
        running = await begun(cancellation, work)
        running.cancel()

        with pytest.raises(asyncio.CancelledError):
            await running
        assert not cancellation.watches

    async def test_a_stop_in_the_same_moment_keeps_its_say(self, bus, cancellation):
        """Both cancel the task; what the stop wants is done, and the record is handed out again."""
        work = Work()
        running = await begun(cancellation, work)
        cancellation.tell(running.cancel)
        await withdraw(bus, "r")

        with pytest.raises(asyncio.CancelledError):
            await running

    async def test_a_result_made_in_the_same_moment_is_dropped(self, bus, cancellation):
        """Nothing of it is in the log yet, so the sample may still end as cancelled; and the task is left clean."""
        work = Work()
        running = await begun(cancellation, work)
        work.gate.set()  # it goes on at the next turn of the loop, and is withdrawn before that
        cancellation.cancels.put("r", Cancel(target="r", cause="now"))
        next(iter(cancellation.watches)).fire(cancellation.cancels.get("r"))
        result = await asyncio.wait_for(running, 5)

        assert (EventKind.CANCELLED, 0) == (result.kind, running.cancelling())

    async def test_work_that_swallows_the_cancellation_is_cancelled_all_the_same(self, bus, cancellation):
        """Its result is dropped."""

        async def stubborn(_):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return Result(EventKind.FINISHED)

        running = await begun(cancellation, stubborn)
        await withdraw(bus, "r/g")

        assert EventKind.CANCELLED is (await asyncio.wait_for(running, 5)).kind

    async def test_a_failure_is_no_withdrawal(self, cancellation):
        """The retries are inside: they see it first, and nothing is cancelled."""
        work = Work()
        work.gate.set()
        work.error = Failure(FailureKind.HANDLER, Boundary.HANDLER_ACT, "oops")
        result = await cancel_middleware(cancellation)(retry(VirtualClock())(work))(job())

        assert EventKind.FAILED is result.kind

    async def test_a_log_that_is_away_is_no_withdrawal(self, bus, cancellation):
        """A BusError under way ends the stage, also when the sample is withdrawn at the same time."""

        async def broken(_):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise BusError("away") from None

        running = await begun(cancellation, broken)
        await withdraw(bus, "r/g")

        with pytest.raises(BusError, match="away"):
            await asyncio.wait_for(running, 5)

    async def test_what_is_held_is_given_up_after_the_record_is_acknowledged(self, bus, cancellation):
        """Not before: the result carries it, as any result carries what follows."""
        given_up = []

        async def withdrawn(message):
            given_up.append(message.sample)

        await withdraw(bus, "r")
        result = await cancel_middleware(cancellation, withdrawn)(Work())(job(sample=2))
        before = list(given_up)
        await result.settle()

        assert ([], [2]) == (before, given_up)

    async def test_a_huge_cause_is_cut(self, bus, cancellation):
        """Anyone may write to `control`; the end must fit into the log."""
        await withdraw(bus, "r", "x" * 500_000)
        result = await cancel_middleware(cancellation)(Work())(job())

        assert len(result.output.message.outcome.cause) == len(result.detail) == 2_000


class TestCancellation:
    """Following `control`."""

    async def test_what_was_withdrawn_before_the_start_is_known_at_the_start(self, bus):
        """No service works on what it could have known."""
        for number in range(700):
            await withdraw(bus, f"r/g{number}")
        followed = Cancellation(bus, bus.clock)
        async with followed.following():
            assert 700 == len(followed.cancels)

    async def test_a_removed_withdrawal_is_in_force_no_more(self, bus, cancellation):
        """A record without a value removes its key; nobody is told, since nothing has to be done."""
        await withdraw(bus, "r")
        told, seen = [], cancellation.changes
        cancellation.tell(lambda: told.append(1))
        await bus.publish(CONTROL.name, None, key=b"cancel/r", partition=0)
        await settle()

        assert (0, [], seen) == (len(cancellation.cancels), told, cancellation.changes)

    async def test_other_records_of_control_tell_nobody(self, bus, cancellation):
        """Credits and cursors come all the time."""
        told = []
        cancellation.tell(lambda: told.append(1))
        await bus.publish(CONTROL.name, b"\xc1", key=b"cancel/r", partition=0)
        await bus.publish(CONTROL.name, None, key=b"cursor/r", partition=0)
        await settle()

        assert ([], 0) == (told, len(cancellation.cancels))

    async def test_a_service_that_outlives_the_log_reads_anew(self, bus):
        """What was withdrawn stays in force meanwhile, and what was withdrawn meanwhile comes to be known."""
        followed, told = Cancellation(bus, bus.clock), []
        async with followed.following_on():
            await withdraw(bus, "a")
            bus.error = BusError("the broker is away")
            await bus.clock.advance(1)
            known = list(followed.cancels)
            await withdraw(bus, "b")
            bus.error = None
            followed.tell(lambda: told.append(sorted(followed.cancels)))
            for _ in range(3):
                await bus.clock.advance(AGAIN_S)

        assert (["a"], [["a", "b"]]) == (known, told)

    async def test_a_reader_that_breaks_at_the_end_holds_nobody_up(self, bus):
        """The end of the service and the end of the reader fall together."""
        async with asyncio.timeout(10):
            async with Cancellation(bus, bus.clock).following_on():
                bus.error = BusError("the broker is away")

        assert {asyncio.current_task()} == asyncio.all_tasks()

    async def test_a_service_that_outlives_the_log_must_have_read_it_once(self, bus):
        """It does not begin blind."""
        await withdraw(bus, "r")
        bus.error = BusError("the broker is away")

        with pytest.raises(BusError, match="broker is away"):
            async with Cancellation(bus, bus.clock).following_on():
                pytest.fail("it began")


class TestMember:
    """A stage and its reader of `control`."""

    def member(self, bus, handle):
        return Member(Stage(name="init", sources=(TASKS,), sink=EPISODES, handle=handle), bus, bus.clock, worker="w")

    async def test_a_reader_that_breaks_ends_the_stage_with_its_error(self, bus):
        """It would go on to work on what is withdrawn."""
        entered, stopped = asyncio.Event(), asyncio.Event()

        async def handle(_):
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()

        await Publisher(bus, bus.clock, "test").publish(TASKS, make_task())
        running = asyncio.create_task(self.member(bus, handle).run())
        await asyncio.wait_for(entered.wait(), 10)
        bus.error = BusError("the reader broke")
        await bus.clock.advance(1)

        with pytest.raises(BusError, match="the reader broke"):
            await asyncio.wait_for(running, 10)
        assert stopped.is_set()
        assert {0} == {progress.offset for progress in (await bus.committed("init", TASKS.name)).values()}

    async def test_a_stage_that_cannot_read_control_takes_no_work(self, bus):
        """Not one record."""

        async def handle(_):
            pytest.fail("it took a record")

        await Publisher(bus, bus.clock, "test").publish(TASKS, make_task())
        bus.error = BusError("the reader broke")

        with pytest.raises(BusError, match="the reader broke"):
            await asyncio.wait_for(self.member(bus, handle).run(), 10)

    async def test_a_record_that_runs_alone_is_cancelled_like_any_other(self, bus):
        """A process for one suspect reads `control` as well."""

        async def handle(_):
            pytest.fail("it took the record")

        await withdraw(bus, "r/g")
        place = await Publisher(bus, bus.clock, "test").publish(TASKS, make_task(run="r", group="g"))
        await self.member(bus, handle).run_only(TopicPartition(TASKS.name, place.partition), place.offset)
        (record,) = await read_all(bus, TRAJECTORIES)

        assert isinstance((await unpack(TRAJECTORIES, record)).message.outcome, Cancelled)

    async def test_a_stop_ends_the_reader_too(self, bus):
        """The member leaves, and nothing of it goes on."""
        member = self.member(bus, Work())
        running = asyncio.create_task(member.run())
        await settle()
        member.stop()
        await bus.clock.advance(1)
        await wait_until(running.done, True)

        assert running.exception() is None
