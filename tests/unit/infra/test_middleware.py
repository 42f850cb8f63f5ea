"""What wraps every handler, each concern on its own."""

from __future__ import annotations

import asyncio
import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.blobs.memory import MemoryBlobs
from infra.bus import Record
from infra.clock import SystemClock, VirtualClock
from infra.dead_letter import Death
from infra.errors import CAUSE_CHARS, BusError, Failure, TooLarge
from infra.events import EventLog
from infra.memory import MemoryBus
from infra.middleware import Job, Output, Result, compose
from infra.middleware.deadline import budget, start_by
from infra.middleware.events import WAITS_EVERY_S, dead_event, events
from infra.middleware.retry import grade_again, retry, start_again
from infra.stage import Done, Member, Stage
from infra.terminal import terminal
from infra.waiting import waits_for
from infra.wire import Publisher, Received, unpack
from infra.worker import Limits
from schemas import codec
from schemas.messages import Budgets, Episode, Rollout, Trajectory
from schemas.outcome import Boundary, Expired, Failed, FailureKind, StopReason
from schemas.retries import RETRIES
from schemas.telemetry import EventKind
from schemas.topics import DEAD, EPISODES, EVENTS, INIT_RETRY_5S, TABLE, TASKS, TRAJECTORIES
from schemas.transcript import Transcript
from tests.logs import make_task, read_all, wait_until

EMPTY = Transcript(tokens=b"", mask=b"", logprobs=b"", spans=(), turns=())


def job(task=None, *, stage="init", message=None, at_ms=1000, headers=()):
    task = task or make_task()
    record = Record("tasks", 0, 5, at_ms, None, b"", headers)
    return Job(stage, Received(record, message or task, b""))


def rollout(task=None, *, gradings=0):
    return Rollout(
        task=task or make_task(),
        transcript=EMPTY,
        verdict={},
        stop=StopReason.DONE,
        backend="",
        worker="",
        tokenizer_digest="",
        gradings=gradings,
    )


async def fine(_):
    return Result(EventKind.FINISHED)


def raising(error):
    async def call(_):
        raise error

    return call


async def memory(clock):
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    return bus


class TestJob:
    """One record in work."""

    def test_a_job_knows_its_task_in_every_stage(self):
        """Each message of a stage is a task or embeds one."""
        task = make_task()
        episode = Episode(task=task, host="local:", lease="l", messages=())

        assert {task.id} == {job(message=message).task.id for message in (task, episode, rollout(task))}

    def test_a_message_without_a_task_is_no_work_for_a_stage(self):
        """Wiring a stage to another topic is a bug, and says so."""
        trajectory = Trajectory(task=make_task(), outcome=Expired(cause=""), stage="init")
        with pytest.raises(TypeError, match="Trajectory has no task"):
            _ = job(message=trajectory).task


class TestCompose:
    """Middleware around a handler."""

    async def test_the_first_is_the_outermost(self):
        """The order of the arguments is the order on the way in."""
        passed = []

        def named(name):
            def around(call):
                async def through(work):
                    passed.append(name)
                    return await call(work)

                return through

            return around

        await compose(fine, named("a"), named("b"))(job())

        assert ["a", "b"] == passed


RETRYABLE = [kind for kind, delays in RETRIES.items() if delays]
FINAL = [kind for kind, delays in RETRIES.items() if not delays]
NOW_MS = 9_000


class TestRetry:
    """Failures become records."""

    async def failed(self, error, task=None, **where):
        return await retry(VirtualClock(NOW_MS))(raising(error))(job(task, **where))

    async def graded(self, error, message):
        return await retry(VirtualClock(NOW_MS), grade_again)(raising(error))(job(stage="eval", message=message))

    @pytest.mark.parametrize(("kind", "tried"), [(kind, n) for kind in RETRYABLE for n in range(len(RETRIES[kind]))])
    async def test_a_failure_of_the_system_asks_for_another_attempt(self, kind, tried):
        """The same task with the next attempt, on the tier that the table says."""
        task = make_task(attempt=tried)
        result = await self.failed(Failure(kind, Boundary.POLICY, "gone"), task)

        assert (EventKind.RETRIED, None) == (result.kind, result.death)
        assert result.output.topic.name == f"init.retry.{RETRIES[kind][tried]}"
        assert msgspec.structs.replace(task, attempt=tried + 1) == result.output.message
        assert result.detail == f"{kind.value} at policy: gone"

    @pytest.mark.parametrize("kind", FINAL)
    async def test_a_failure_that_would_repeat_ends_the_sample(self, kind):
        """With its kind, boundary and cause, at any attempt; never with a reward."""
        result = await self.failed(Failure(kind, Boundary.HANDLER_ACT, "oops"))
        trajectory = result.output.message

        assert (EventKind.FAILED, TRAJECTORIES) == (result.kind, result.output.topic)
        assert Failed(kind=kind, boundary=Boundary.HANDLER_ACT, cause="oops") == trajectory.outcome
        assert ("init", None) == (trajectory.stage, trajectory.transcript)

    @pytest.mark.parametrize("kind", FailureKind)
    async def test_attempts_are_bounded_by_the_kind_of_the_last_failure(self, kind):
        """The last one ends as failed, and its record is given up with how often it was tried."""
        tried = len(RETRIES[kind])
        result = await self.failed(Failure(kind, Boundary.POLICY, "gone"), make_task(attempt=tried))

        assert (EventKind.FAILED, TRAJECTORIES) == (result.kind, result.output.topic)
        assert result.death == Death(
            stage="init", cause="policy: gone", kind=kind.value, attempts=tried + 1, first_failed_ms=NOW_MS
        )

    @given(kinds=st.lists(st.sampled_from(FailureKind), min_size=10, max_size=10))
    def test_whatever_breaks_a_sample_ends(self, kinds):
        """After one attempt more than the longest line of the table has delays, in whatever order failures come."""
        task, ends = make_task(), 0
        for kind in kinds:
            again = start_again(job(task), kind)
            if again.output is None:
                break
            ends, task = ends + 1, again.output.message

        assert ends == task.attempt <= max(map(len, RETRIES.values()))

    @pytest.mark.parametrize("kind", [kind for kind in RETRYABLE if kind is not FailureKind.ENGINE])
    async def test_a_finished_rollout_is_graded_again_and_not_thrown_away(self, kind):
        """Its task keeps its attempt, and nothing of what was sampled is lost."""
        message = rollout(make_task(attempt=2))
        result = await self.graded(Failure(kind, Boundary.HANDLER_GRADE, "no sandbox"), message)

        assert result.output.topic.name == f"eval.retry.{RETRIES[kind][0]}"
        assert msgspec.structs.replace(message, gradings=1) == result.output.message

    async def test_gradings_are_bounded_as_attempts_are(self):
        """They are counted apart from the attempts of the sample."""
        message = rollout(gradings=len(RETRIES[FailureKind.INFRASTRUCTURE]))
        result = await self.graded(Failure(FailureKind.INFRASTRUCTURE, Boundary.HANDLER_GRADE, "no"), message)

        assert (EventKind.FAILED, 4) == (result.kind, result.death.attempts)

    async def test_a_rollout_that_cannot_be_used_is_made_again(self):
        """What the engine spoiled no grader mends."""
        failure = Failure(FailureKind.ENGINE, Boundary.TRANSCRIPT, "spans with gaps")
        result = await self.graded(failure, rollout(gradings=1))

        assert (INIT_RETRY_5S, 1) == (result.output.topic, result.output.message.attempt)

    async def test_when_an_attempt_failed_first_is_kept(self):
        """From attempt to attempt, through the stages between."""
        failure = Failure(FailureKind.ENGINE, Boundary.POLICY, "gone")
        headers = (("first-failed-at-ms", b"55"),)
        first, second = await self.failed(failure), await self.failed(failure, headers=headers)
        last = await self.failed(failure, make_task(attempt=9), headers=headers)

        assert (NOW_MS, 55, 55) == (first.first_failed_ms, second.first_failed_ms, last.death.first_failed_ms)

    async def test_a_bug_is_a_failure_of_the_infrastructure_with_its_trace_in_the_log(self, caplog):
        """One bad sample cannot stop a stage."""
        result = await self.failed(ZeroDivisionError("oops"))

        assert (EventKind.RETRIED, "infrastructure at stage: ZeroDivisionError: oops") == (result.kind, result.detail)
        assert "Traceback" in caplog.text

    @pytest.mark.parametrize("error", [BusError("the log is away"), asyncio.CancelledError()])
    async def test_a_log_that_is_away_and_a_cancellation_pass(self, error):
        """Nothing could be written about it: the record stays uncommitted."""
        with pytest.raises(type(error)):
            await self.failed(error)

    @pytest.mark.parametrize("cause", ["x" * 3_000_000, "\udce4 is no Unicode"])
    async def test_whatever_a_handler_raises_its_failure_fits_into_the_log(self, cause):
        """A text of megabytes, or one that is not Unicode, does not make a dead stage."""
        bus = await memory(SystemClock())
        result = await self.failed(Failure(FailureKind.HANDLER, Boundary.HANDLER_ACT, cause))
        await Publisher(bus, SystemClock(), "test").publish(TRAJECTORIES, result.output.message)
        (record,) = await read_all(bus, TRAJECTORIES)
        kept = (await unpack(TRAJECTORIES, record)).message.outcome.cause

        assert kept[:5] == cause[:5] or "udce4" in kept
        assert len(kept) < CAUSE_CHARS + 100
        assert len(result.detail) < CAUSE_CHARS + 200


class TestTerminal:
    """The record of a sample that has no rollout must always fit into the log."""

    HUGE = make_task(payload={"image": random.Random(0).randbytes(950_000)})
    """Larger than what we publish, smaller than what a foreign producer can."""

    async def test_a_task_that_cannot_be_carried_once_more_loses_its_payload(self):
        """Its digest stays, by which the arbiter knows it."""
        bus = await memory(SystemClock())
        await Publisher(bus, SystemClock(), "test").publish(TRAJECTORIES, terminal(self.HUGE, Expired(cause=""), "run"))
        (record,) = await read_all(bus, TRAJECTORIES)
        task = (await unpack(TRAJECTORIES, record)).message.task

        assert (self.HUGE.id, self.HUGE.payload_digest) == (task.id, task.payload_digest)
        assert task.payload["left_out_bytes"] > 950_000

    def test_any_other_task_is_kept_whole(self):
        """For whoever looks at the record."""
        assert make_task() == terminal(make_task(), Expired(cause=""), "run").task

    @pytest.mark.parametrize(
        ("kind", "blobs", "ended", "died_of"),
        [
            (FailureKind.HANDLER, None, TRAJECTORIES, [b"handler"]),
            (FailureKind.ENGINE, None, DEAD, [b"too_large"]),
            (FailureKind.ENGINE, MemoryBlobs(), INIT_RETRY_5S, []),
        ],
        ids=["failed", "cannot be sent on", "sent on as a claim check"],
    )
    async def test_a_task_at_the_limit_of_the_log_does_not_stop_its_stage(self, kind, blobs, ended, died_of):
        """It ends as failed, or goes to `dead` when it cannot be sent on for another attempt; the stream goes on."""
        bus = await memory(SystemClock())
        bus.blobs = blobs
        await bus.publish(TASKS.name, codec.encode(self.HUGE), partition=0)
        await bus.publish(TASKS.name, codec.encode(make_task(sample=1)), partition=0)

        async def handle(task):
            if task.sample == 0:
                raise Failure(kind, Boundary.STAGE, "no")
            return Done(Episode(task=task, host="local:", lease="l", messages=()))

        stage = Stage(name="init", sources=(TASKS, INIT_RETRY_5S), sink=EPISODES, handle=handle)
        member = Member(stage, bus, SystemClock(), worker="init-test", limits=Limits(poll_s=0.02, commit_every_s=0.02))
        running = asyncio.create_task(member.run())

        async def committed():
            return sum(progress.offset for progress in (await bus.committed("init", TASKS.name)).values())

        await wait_until(committed, 2)
        member.stop()
        await asyncio.wait_for(running, 5)
        letters = [dict(letter.headers)["x-kind"] for letter in await read_all(bus, DEAD)]

        assert [1, 1] == [len(await read_all(bus, topic)) for topic in (ended, EPISODES)]
        assert died_of == letters


class TestStartBy:
    """A task is not started too late."""

    async def test_a_late_task_expires_unseen(self):
        """At any attempt; the cause says how late it was."""
        clock = VirtualClock(now_ms=5_000)
        seen = []

        async def call(work):
            seen.append(work)
            return await fine(work)

        late = await start_by(clock)(call)(job(make_task(start_by_ms=4_000, attempt=2)))
        just = await start_by(clock)(call)(job(make_task(start_by_ms=5_000)))

        assert (EventKind.EXPIRED, TRAJECTORIES) == (late.kind, late.output.topic)
        assert Expired(cause="not started by its deadline: 1000 ms late in init") == late.output.message.outcome
        assert (EventKind.FINISHED, 1) == (just.kind, len(seen))


class TestBudget:
    """Time inside a stage."""

    @pytest.mark.parametrize("stage", ["init", "run", "eval"])
    async def test_a_sample_that_stays_longer_expires(self, stage):
        """Each stage counts its own seconds; what it did is cancelled."""
        cancelled = asyncio.Event()

        async def stuck(_):
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        task = make_task(budgets=Budgets(**{"init_s": 9, "run_s": 9, "eval_s": 9, f"{stage}_s": 0.01}))
        result = await budget(stage)(stuck)(job(task, stage=stage))

        assert (EventKind.EXPIRED, True) == (result.kind, cancelled.is_set())
        assert f"{stage} took longer than its budget of 0.01 s" in result.detail

    async def test_a_budget_stands_still_while_a_service_is_away(self):
        """It is used up by work alone: an outage much longer than the budget ends nothing."""
        asked, end = 0, asyncio.Event()
        loop = asyncio.get_running_loop()
        began = loop.time()

        def still_s():
            nonlocal asked
            asked += 1
            return 100 + loop.time() - began

        async def waiting(_):
            await end.wait()
            return Result(EventKind.FINISHED)

        task = make_task(budgets=Budgets(init_s=9, run_s=0.01, eval_s=9))
        running = asyncio.create_task(budget("run", still_s)(waiting)(job(task, stage="run")))
        await wait_until(lambda: asked, 5)
        assert not running.done()
        end.set()

        assert EventKind.FINISHED is (await asyncio.wait_for(running, 30)).kind

    async def test_after_an_outage_the_rest_of_the_budget_is_left(self):
        """No more: what stands still once counts again afterwards."""
        stood = iter([0.0, 0.2])

        async def stuck(_):
            await asyncio.Event().wait()

        task = make_task(budgets=Budgets(init_s=9, run_s=0.01, eval_s=9))
        limited = budget("run", lambda: next(stood, 0.2))(stuck)(job(task, stage="run"))

        assert EventKind.EXPIRED is (await asyncio.wait_for(limited, 30)).kind

    async def test_a_timeout_of_the_handlers_own_is_not_the_budgets(self):
        """It is the handler's error, and the retry middleware's business."""
        with pytest.raises(TimeoutError, match="mine"):
            await budget("init")(raising(TimeoutError("mine")))(job())


class TestEvents:
    """What happens to each sample."""

    async def test_the_start_and_the_end_of_a_job_are_reported(self):
        """With the time in the queue before and inside the stage."""
        clock = VirtualClock(now_ms=4_000)
        bus = await memory(clock)
        log = EventLog(Publisher(bus, clock, "w"), clock, "w")

        async def slow(_):
            await clock.advance(2)
            return Result(EventKind.FAILED, detail="oops")

        await events(log, clock)(slow)(job(make_task(sample=3, attempt=1), at_ms=1_500))
        await log.flush()
        (record,) = await read_all(bus, EVENTS)
        began, ended = (await unpack(EVENTS, record)).message.events

        assert (EventKind.STARTED, 4_000, 2_500, 0) == (began.kind, began.at_ms, began.waited_ms, began.took_ms)
        assert (EventKind.FAILED, 6_000, 2_000, "oops") == (ended.kind, ended.at_ms, ended.took_ms, ended.detail)
        assert {("test", "g0", 3, 1, "init")} == {
            (event.run, event.group, event.sample, event.attempt, event.stage) for event in (began, ended)
        }

    async def said(self, *steps):
        """Return what a job's events tell of its waits: (seconds after the start, what) for each."""
        clock = VirtualClock(now_ms=0)
        bus = await memory(clock)
        log = EventLog(Publisher(bus, clock, "init-1"), clock, "init-1")

        async def waits(_):
            for seconds, what in steps:
                await clock.advance(seconds)
                waits_for(what)
            return Result(EventKind.FINISHED)

        await events(log, clock)(waits)(job(make_task()))
        waits_for("heard by nobody")
        await log.flush()
        (record,) = await read_all(bus, EVENTS)
        found = (await unpack(EVENTS, record)).message.events
        assert (EventKind.STARTED, EventKind.FINISHED) == (found[0].kind, found[-1].kind)
        assert {EventKind.WAITING} >= {event.kind for event in found[1:-1]}
        return [(event.at_ms / 1000, event.detail) for event in found[1:-1]]

    async def test_what_a_job_waits_for_is_said_when_it_changes_and_when_it_is_over(self):
        """Saying the same again is free; so is the end of a wait that was never said."""
        steps = [(0, ""), (1, "a place"), (1, "a place"), (1, ""), (1, "")]

        assert [(1, "a place"), (3, "")] == await self.said(*steps)

    async def test_waits_are_said_at_most_every_few_seconds(self):
        """A stage that hurries from wait to wait does not flood the log; the end of what was said is."""
        steps = [(1, "a"), (1, "b"), (1, ""), (1, "c"), (WAITS_EVERY_S, "d"), (1, "e")]

        assert [(1, "a"), (3, ""), (9, "d")] == await self.said(*steps)


class TestDeadEvent:
    """A record that became no job is reported as far as its headers name a sample."""

    def event(self, *headers):
        record = Record("tasks", 3, 5, 7, None, b"\xc1", headers)
        return dead_event(record, Death(stage="init", cause="not msgpack"), 9)

    def test_it_names_the_sample_that_the_headers_name(self):
        """And where the record lay."""
        event = self.event(("ce_subject", b"r/g/3"), ("attempt", b"2"))

        assert ("r", "g", 3, 2, "init", EventKind.DEAD, 9) == (
            event.run,
            event.group,
            event.sample,
            event.attempt,
            event.stage,
            event.kind,
            event.at_ms,
        )
        assert event.detail == "poison, tasks:3:5: not msgpack"

    @pytest.mark.parametrize(
        "subject", [b"", b"r", b"/", b"\xff/g/x", b"r/g/-1", b"r/g/" + b"9" * 30, "r/g/\u00b2".encode()]
    )
    def test_headers_may_be_nonsense(self, subject):
        """Anyone may have written them."""
        assert self.event(("ce_subject", subject), ("attempt", subject)).sample == 0


PACK = Publisher(MemoryBus(), SystemClock(), "test").pack


class TestStageCall:
    """A stage's handler as a call."""

    def stage(self, handle):
        return Stage(name="init", sources=(TASKS, INIT_RETRY_5S), sink=EPISODES, handle=handle)

    async def test_a_handler_without_output_ends_well(self):
        """Another worker published already."""

        async def handle(_):
            return None

        assert Result(EventKind.FINISHED) == await self.stage(handle).call(PACK)(job())

    async def test_an_output_goes_to_the_sink_with_its_bytes_and_what_follows(self):
        """Packed before it leaves the call, so that the log cannot refuse it later."""

        async def settle():
            raise AssertionError("not here")

        async def handle(task):
            return Done(Episode(task=task, host="local:", lease="l", messages=()), settle)

        result = await self.stage(handle).call(PACK)(job())

        assert (EventKind.FINISHED, settle) == (result.kind, result.settle)
        assert isinstance(result.output, Output)
        assert EPISODES is result.output.topic
        assert codec.encode(result.output.message) == result.output.packed.value

    @pytest.mark.parametrize(
        ("content", "says"),
        [(object(), "TypeError"), ("x" * 20_000_000, TooLarge.__name__), (10**30, "TypeError")],
    )
    async def test_a_result_that_the_log_cannot_carry_fails_its_own_sample(self, content, says):
        """A handler that puts what it likes into a message is the handler's failure."""

        async def handle(task):
            return Done(Episode(task=task, host="local:", lease="l", messages=({"role": "user", "content": content},)))

        result = await self.stage(handle).call(PACK, retry(SystemClock()))(job())

        assert (EventKind.FAILED, TRAJECTORIES) == (result.kind, result.output.topic)
        assert says in json.dumps(result.detail)


@pytest.mark.parametrize(("tells", "told"), [(True, {"started", "finished", "dead"}), (False, {"dead"})])
async def test_a_stage_that_tells_nothing_does_its_work_all_the_same(tells, told):
    """Only what became no job is still told: nothing else names its sample."""
    bus = MemoryBus()
    await bus.create_topics(TABLE)

    async def handle(task):
        return Done(Episode(task=task, host="local:", lease="l", messages=()))

    stage = Stage(name="init", sources=(TASKS,), sink=EPISODES, handle=handle)
    limits = Limits(poll_s=0.02, commit_every_s=0.02)
    member = Member(stage, bus, SystemClock(), worker="w", limits=limits, tells=tells)
    await Publisher(bus, SystemClock(), "test").publish(TASKS, make_task())
    await bus.publish(TASKS.name, b"no message")
    running = asyncio.create_task(member.run())

    async def done():
        return len(await read_all(bus, EPISODES)) + len(await read_all(bus, DEAD))

    await wait_until(done, 2)
    member.stop()
    await asyncio.wait_for(running, 30)
    records = [(await unpack(EVENTS, record)).message for record in await read_all(bus, EVENTS)]

    assert told == {event.kind.value for record in records for event in record.events}
