"""Follows one run while it goes on."""

from __future__ import annotations

import asyncio

import pytest

from infra.clock import VirtualClock, settle
from infra.errors import WaitTimeout
from infra.memory import MemoryBus
from infra.wire import Publisher
from rollmill.watch import RunWatch
from schemas.decisions import (
    Branch,
    DropReason,
    Evaluated,
    GroupDropped,
    Member,
    RunEnded,
    StepDecided,
    TrainerStarted,
    VersionPublished,
)
from schemas.scores import Purpose
from schemas.telemetry import EventKind, MetricPoint, Metrics, StageEvent, StageEvents
from schemas.topics import DECISIONS, EVENTS, METRICS, TABLE
from trainer.evaluation import Played, scores


class Run:
    """A run as a test writes it, with a watch on it."""

    def __init__(self, bus, clock):
        self.bus, self.clock = bus, clock
        self.watch = RunWatch(bus, clock, "r")
        self._publisher = Publisher(bus, clock, "test")

    @property
    def state(self):
        return self.watch.state

    async def decide(self, kind, **fields):
        position = await self._publisher.publish(DECISIONS, kind(**{"run": "r", **fields}))
        await settle()
        return position.offset

    async def start_trainer(self):
        return await self.decide(TrainerStarted, config={}, start=0, step=0)

    async def step(self, step, *groups, **changes):
        members = tuple(
            Member(group=group, sample=sample, offset=0, content="c", reward=0.0)
            for group in groups
            for sample in range(2)
        )
        fields = {"epoch": 0, "position": 0, "digest": "d", "advantage_digest": "a", **changes}
        await self.decide(StepDecided, step=step, members=members, **fields)

    async def drop(self, reason, **changes):
        fields = {"epoch": 0, "position": 0, "group": "x", "members": (), **changes}
        await self.decide(GroupDropped, reason=reason, **fields)

    async def publish_version(self, step, version, **changes):
        await self.decide(VersionPublished, **{"epoch": 0, "step": step, "version": version, "digest": "d", **changes})

    async def end(self, reason="done", **changes):
        await self.decide(RunEnded, **{"epoch": 0, "position": 0, "step": 0, "reason": reason, **changes})

    async def measure(self, name, value, step=0, run="r"):
        point = MetricPoint(name=name, value=value, at_ms=0, step=step)
        await self._publisher.publish(METRICS, Metrics(run=run, service="trainer", points=(point,)))
        await settle()

    async def event(self, kind, *, stage="run", sample=0, attempt=0, run="r"):
        one = StageEvent(run=run, group="g", sample=sample, attempt=attempt, stage=stage, kind=kind, at_ms=0)
        await self._publisher.publish(EVENTS, StageEvents(worker="w", events=(one,)), partition=0)
        await settle()


@pytest.fixture
async def run():
    """A run in whose middle the watch begins."""
    clock = VirtualClock()
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    run = Run(bus, clock)
    await run.event(EventKind.STARTED, sample=99)
    await run.watch.start()
    following = asyncio.create_task(run.watch.follow())
    await settle()
    yield run
    assert not following.done(), following
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_decisions_show_how_far_the_run_is(run):
    """Steps, versions, groups kept and dropped, the end."""
    await run.start_trainer()
    await run.step(1, "a", "b")
    await run.drop(DropReason.NO_VARIANCE)
    await run.drop(DropReason.STALE)
    await run.publish_version(1, 7)
    await run.step(2, "c")
    state = run.state

    assert (1, 2, 1, 7, 3) == (state.trainers, state.decided, state.step, state.version, state.kept)
    assert ({"filtered": 1, "stale": 1}, None) == (dict(state.dropped), state.ended)
    await run.end("success reached")
    assert state.ended == "success reached"


async def test_a_branch_takes_undone_steps_and_their_groups_back(run):
    """What is shown is where the run stands; the steps made anew count again."""
    epoch = await run.start_trainer()
    for number in (1, 2, 3):
        await run.step(number, "a", "b", epoch=epoch)
        await run.publish_version(number, number, epoch=epoch)
        figures = scores("r.eval", [Played(task="t", success=1.0)])
        await run.decide(
            Evaluated, epoch=epoch, step=number, version=number, purpose=Purpose.EVALUATION, scores=figures
        )
    assert [1, 2, 3] == list(run.state.evaluated)
    await run.decide(Branch, epoch=epoch, from_step=1, position=0)
    assert [1] == list(run.state.evaluated)
    assert (1, 1, 2) == (run.state.decided, run.state.step, run.state.kept)
    await run.publish_version(1, 4, epoch=epoch)
    await run.step(2, "c", epoch=epoch)

    assert (2, 1, 3, 4) == (run.state.decided, run.state.step, run.state.kept, run.state.version)


async def test_the_decisions_of_a_trainer_that_was_replaced_do_not_show(run):
    """It may still write, and nobody listens."""
    old = await run.start_trainer()
    new = await run.start_trainer()
    await run.end("I am the old one", epoch=old)
    await run.step(9, "a", epoch=old)
    await run.step(1, "b", epoch=new)

    assert (2, None, 1, 1) == (run.state.trainers, run.state.ended, run.state.decided, run.state.kept)


async def test_metrics_are_the_last_values_and_the_curve_of_success(run):
    """Of this run alone."""
    await run.measure("trainer.loss", 2.0)
    await run.measure("trainer.loss", 1.0)
    await run.measure("trainer.loss", 9.0, run="other")
    await run.measure("trainer.recent_success_mean", 0.25, step=1)
    await run.measure("trainer.recent_success_mean", 0.5, step=2)

    assert (1.0, [(1, 0.25), (2, 0.5)]) == (run.state.metrics["trainer.loss"], run.state.curve)


async def test_samples_are_in_flight_from_their_start_to_their_end(run):
    """By stage; ends without a grade by kind."""
    await run.event(EventKind.STARTED, stage="init")
    await run.event(EventKind.FINISHED, stage="init")
    await run.event(EventKind.STARTED)
    await run.event(EventKind.STARTED, sample=1)
    await run.event(EventKind.RETRIED, sample=1)
    await run.event(EventKind.WAITING)
    await run.event(EventKind.STARTED, run="other", sample=2)

    assert {"run": 1} == {stage: count for stage, count in run.state.in_flight.items() if count}
    assert ({"init": 1}, {"retried": 1}, 0) == (
        dict(run.state.finished),
        dict(run.state.failures),
        run.state.repeated,
    )


async def test_work_repeated_after_a_crash_is_counted_and_in_flight_once(run):
    """The same attempt of the same stage started again; another attempt is no repetition."""
    await run.event(EventKind.STARTED)
    await run.event(EventKind.STARTED)
    assert (1, 1) == (run.state.repeated, run.state.in_flight["run"])
    await run.event(EventKind.FINISHED)
    await run.event(EventKind.FINISHED)
    await run.event(EventKind.STARTED, attempt=1)

    assert (1, 1) == (run.state.repeated, run.state.in_flight["run"])


async def test_what_began_before_the_watch_is_never_less_than_nothing(run):
    """Its end is seen, its start was not."""
    await run.event(EventKind.FINISHED, sample=99)

    assert (0, 1) == (run.state.in_flight["run"], run.state.finished["run"])


async def test_unreadable_records_are_skipped(run):
    """Nothing that is shown depends on one record."""
    for topic in (DECISIONS, METRICS, EVENTS):
        await run.bus.publish(topic.name, b"\xc1", partition=0)
    await run.start_trainer()

    assert run.state.trainers == 1


async def test_a_condition_is_waited_for(run):
    """It is looked at whenever something came."""
    waiting = asyncio.create_task(run.watch.until(lambda state: state.decided >= 2, "step 2", 60))
    await run.step(1, "a")
    asleep = not waiting.done()
    await run.step(2, "a")
    await asyncio.wait_for(waiting, 5)

    assert asleep


async def test_a_condition_that_does_not_come_is_given_up(run):
    """With what was waited for, and where the run stands."""
    await run.step(1, "a")
    waiting = asyncio.create_task(run.watch.until(lambda state: state.decided >= 2, "step 2", 60))
    await settle()
    await run.clock.advance(61)

    with pytest.raises(WaitTimeout, match=r"waited 60 s for step 2 of run 'r'; it stands at .*decided=1"):
        await asyncio.wait_for(waiting, 5)


async def test_a_watch_that_nobody_feeds_gives_up_in_time_too():
    """Its reader may have ended."""
    clock = VirtualClock()
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    watch = RunWatch(bus, clock, "r")
    await watch.start()
    waiting = asyncio.create_task(watch.until(lambda _: False, "the end", 60))
    await settle()
    await clock.advance(61)

    with pytest.raises(WaitTimeout, match="waited 60 s for the end"):
        await asyncio.wait_for(waiting, 5)
