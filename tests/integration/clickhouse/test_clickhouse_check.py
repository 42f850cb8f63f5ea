"""The check proves where every sample went, and fails when one of its rules is broken on purpose."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from infra.clickhouse.check import check, conservation
from infra.clickhouse.client import connect
from infra.clock import SystemClock
from infra.errors import WaitTimeout
from infra.trajectories import trajectories_of
from infra.wire import Publisher
from schemas.arbiter import Arbiter, Ruling
from schemas.control import RunManifest
from schemas.decisions import (
    Branch,
    DropReason,
    GroupDropped,
    Member,
    RunEnded,
    SampleRef,
    StepDecided,
    TrainerStarted,
    live_decisions,
)
from schemas.dispositions import dispositions
from schemas.messages import Trajectory
from schemas.outcome import Boundary, Cancelled, Completed, Expired, Failed, FailureKind
from schemas.topics import CONTROL, DECISIONS, TASKS, TRAJECTORIES
from tests.golden.samples import TASK
from tests.integration.clickhouse.helpers import rows_of, running_sink, until_stored

pytestmark = pytest.mark.integration

RUN = "r"
FAR_MS = 4_000_000_000_000
DONE = Completed(components={"goal": 1.0}, reward=1.0, success=1.0, truncated=False)
LOST = Failed(kind=FailureKind.ENGINE, boundary=Boundary.POLICY, cause="gone")
OTHERS = (LOST, Cancelled(cause="by request"), Expired(cause="late"))


@dataclass
class Log:
    """A run written to the bus by hand, with what the schemas' own rules say about it."""

    bus: Any
    admitted: list[tuple[str, int]] = field(default_factory=list)
    arbiter: Arbiter = field(default_factory=Arbiter)
    accepted: dict[tuple[str, int], tuple[int, Any]] = field(default_factory=dict)
    decisions: list[tuple[int, Any]] = field(default_factory=list)
    end: int = 0

    def __post_init__(self) -> None:
        self.publisher = Publisher(self.bus, SystemClock(), "test")

    async def admit(self, group, samples=2, *, start_by_ms=FAR_MS):
        for sample in range(samples):
            await self.publisher.publish(TASKS, self.task(group, sample, start_by_ms=start_by_ms))
            self.admitted.append((group, sample))

    async def end_sample(self, group, sample, outcome, *, digest="d"):
        record = Trajectory(task=self.task(group, sample, digest=digest), outcome=outcome, stage="eval")
        offset = (await self.publisher.publish(TRAJECTORIES, record)).offset
        if self.arbiter.rule(group, sample, digest, offset) is Ruling.ACCEPTED:
            self.accepted[group, sample] = (offset, outcome)
        self.end = offset + 1
        return offset

    async def decide(self, decision):
        offset = (await self.publisher.publish(DECISIONS, decision)).offset
        self.decisions.append((offset, decision))
        return offset

    def task(self, group, sample, *, start_by_ms=FAR_MS, digest="d"):
        place = {"run": RUN, "group": group, "sample": sample, "row": sum(map(ord, group))}
        return msgspec.structs.replace(TASK, **place, payload_digest=digest, start_by_ms=start_by_ms)

    async def start(self):
        return await self.decide(TrainerStarted(run=RUN, config={}, start=0, step=0))

    async def step(self, epoch, number, trained, buffered=(), *, position=None):
        step = StepDecided(
            run=RUN,
            epoch=epoch,
            step=number,
            position=self.end if position is None else position,
            members=tuple(
                Member(group=group, sample=sample, offset=offset, content="", reward=1.0)
                for group, sample, offset in trained
            ),
            digest="",
            advantage_digest="",
            buffered=refs(buffered),
        )
        return await self.decide(step)

    def expected(self):
        live = [decision for _, decision in live_decisions(self.decisions)]
        started = any(isinstance(decision, TrainerStarted) for decision in live)
        return dispositions(self.admitted, self.accepted, live, has_trainer=started)


def refs(named):
    return tuple(SampleRef(group=group, sample=sample, offset=offset) for group, sample, offset in named)


@pytest.fixture
def log(bus):
    return Log(bus)


async def report_of(log, address):
    async with running_sink(log.bus, address):
        return await check(log.bus, address, SystemClock(), RUN, wait_s=30)


async def a_small_run(log):
    """Two groups: one trained on, one read and waiting."""
    await log.admit("g")
    await log.admit("h")
    places = [(group, sample, await log.end_sample(group, sample, DONE)) for group in "gh" for sample in (0, 1)]
    epoch = await log.start()
    return epoch, places[:2], places[2:]


async def test_a_sound_run_is_conserved(log, address):
    """Every bucket adds up, superseded and conflicting records and a fenced trainer's decisions do not count."""
    epoch, trained, waiting = await a_small_run(log)
    await log.end_sample("g", 0, LOST)
    await log.end_sample("g", 5, DONE, digest="other")
    await log.step(epoch, 1, trained, waiting)
    await log.start()
    await log.step(epoch, 2, waiting)  # by the trainer that was fenced off
    await log.admit("i")
    await log.end_sample("i", 0, LOST)
    report = await report_of(log, address)
    assert report.conserved, report.violations
    assert report.counts == {"open": 1, "failed": 1, "buffered": 2, "trained": 2}
    assert log.expected().counts() == report.counts
    client = await connect(address)
    try:
        line = await conservation(client, RUN)
    finally:
        await client.close()
    assert tuple(line[name] for name in ("admitted", "trained", "buffered", "violations", "conserved")) == (
        6,
        2,
        2,
        0,
        1,
    )
    assert str(report) == "r: 6 admitted = 1 open + 1 failed + 2 buffered + 2 trained: conserved"


async def test_a_an_open_sample_past_its_time_is_found(log, address):
    """(a) The reaper should have ended it."""
    await a_small_run(log)
    await log.admit("late", 1, start_by_ms=1_700_000_000_000)
    report = await report_of(log, address)
    assert not report.conserved
    assert list(report.violations) == ["late/0: (a) open past its time, 2023-11-14 22:29:50.000"]


async def test_a_a_record_that_nobody_admitted_is_found(log, address):
    """(a) The buckets must sum to what was admitted."""
    await a_small_run(log)
    await log.end_sample("ghost", 0, DONE)
    report = await report_of(log, address)
    assert list(report.violations) == ["ghost/0: (a) has a record or a decision, but no task admitted it"]


async def test_b_a_decision_that_names_another_record_is_found(log, address):
    """(b) It trained on a record that was superseded, or on no completed one."""
    epoch, trained, waiting = await a_small_run(log)
    later = await log.end_sample("g", 0, DONE)
    await log.step(epoch, 1, [("g", 0, later), trained[1]], waiting)
    report = await report_of(log, address)
    assert [f"g/0: (b) trained names offset {later}; accepted is a completed record at 0"] == list(report.violations)
    assert log.expected().violations


async def test_c_a_sample_that_no_row_places_is_found(log, address):
    """(c) It was read and is in no decision: no bucket is ever a remainder."""
    epoch, trained, waiting = await a_small_run(log)
    await log.step(epoch, 1, trained, waiting[:1])
    report = await report_of(log, address)
    assert "h/1: (c) read at offset 3, but no decision names it" in report.violations
    assert not report.conserved
    assert log.expected().violations


async def test_d_a_sample_in_two_live_steps_is_found(log, address):
    """(d) It was trained on twice."""
    epoch, trained, waiting = await a_small_run(log)
    await log.step(epoch, 1, trained, waiting)
    await log.step(epoch, 2, [*waiting, trained[0]])
    report = await report_of(log, address)
    assert list(report.violations) == ["g/0: (d) in 2 live decisions"]
    assert log.expected().violations


async def test_the_samples_of_undone_steps_are_rolled_back(log, address):
    """Two steps, a branch before both, one again: every sample is in one place, and the branch of a zombie is none."""
    epoch, trained, waiting = await a_small_run(log)
    await log.step(epoch, 1, trained, waiting)
    await log.step(epoch, 2, waiting[:1], waiting[1:])
    epoch = await log.start()
    await log.decide(Branch(run=RUN, epoch=epoch, from_step=0, position=log.end))
    await log.step(epoch, 1, waiting[1:])
    await log.decide(Branch(run=RUN, epoch=epoch - 1, from_step=0, position=log.end))  # by the one that was fenced off
    report = await report_of(log, address)
    assert report.conserved, report.violations
    assert report.counts == {"trained": 1, "rolled_back": 3}
    assert log.expected().counts() == report.counts


async def graded_anew(log, *, leave_out=()):
    """The small run, all of whose outcomes but some were graded anew as run `new`."""
    await a_small_run(log)
    await log.end_sample("g", 0, LOST)  # superseded: nothing of it is graded
    partition = trajectories_of(RUN).partition
    end = (await log.bus.end_offsets(TRAJECTORIES.name))[partition]
    await log.publisher.publish(CONTROL, RunManifest(run=RUN, seed=1, samples=2))
    extra = {"replay_of": RUN, "from": "eval", "replayed": [0, end]}
    await log.publisher.publish(CONTROL, RunManifest(run="new", seed=1, samples=2, extra=extra))
    for number, (group, sample) in enumerate((group, sample) for group in "gh" for sample in (0, 1)):
        if number not in leave_out:
            await bring(log, group, sample)


async def bring(log, group, sample, *, stage="replay"):
    task = msgspec.structs.replace(log.task(group, sample), run="new", group=f"new-{group}")
    record = Trajectory(task=task, outcome=DONE, stage=stage)
    await log.publisher.publish(TRAJECTORIES, record)


async def report_of_new(log, address):
    async with running_sink(log.bus, address):
        return await check(log.bus, address, SystemClock(), "new", wait_s=30)


async def test_a_run_made_by_grading_another_one_anew_is_conserved(log, address):
    """It has no tasks: each outcome brings its sample along, once for each that the other run had by then."""
    await graded_anew(log)
    await log.admit("late")
    await log.end_sample("late", 0, DONE)  # after the replay
    await bring(log, "g", 0)  # superseded
    report = await report_of_new(log, address)

    assert report.conserved, report.violations
    assert (4, {"unread": 4}) == (report.admitted, report.counts)
    assert await rows_of(address, "SELECT admitted, conserved FROM conservation(run = 'new')") == [(4, 1)]


async def test_a_an_outcome_that_was_not_graded_anew_is_found(log, address):
    """A replay that was killed half way is not a whole run."""
    await graded_anew(log, leave_out={1, 2})
    report = await report_of_new(log, address)

    assert not report.conserved
    assert (2, 2) == (report.admitted, report.found)
    assert "(a) g/1 of run r was to be graded anew, and has no record here" in report.violations


async def test_a_an_outcome_that_no_other_run_had_is_found(log, address):
    """Neither what a replay brings besides, nor what somebody else writes without a task."""
    await graded_anew(log)
    await bring(log, "x", 0)
    await bring(log, "y", 1, stage="eval")
    report = await report_of_new(log, address)

    assert not report.conserved
    assert any("new-x/0: brought by a replay, but run r has no such" in text for text in report.violations)
    assert any("new-y/1: (a) has a record or a decision, but no task" in text for text in report.violations)


async def test_a_row_that_is_stored_twice_is_found(log, address):
    """The sink promises exactly once; the check does not take its word."""
    await a_small_run(log)
    async with running_sink(log.bus, address):
        await until_stored(log.bus, "trajectories")
        await until_stored(log.bus, "tasks")
        await rows_of(address, "INSERT INTO trajectories SELECT * FROM trajectories WHERE kafka_offset = 2")
        report = await check(log.bus, address, SystemClock(), RUN)
    assert report.found == 1
    assert report.violations[0].endswith(":2 is stored 2 times")


async def test_an_unknown_run_is_not_conserved(log, address):
    """A misspelt name must not look like success."""
    async with running_sink(log.bus, address):
        report = await check(log.bus, address, SystemClock(), "nosuch")
    assert (report.admitted, report.conserved) == (0, False)


async def test_a_sink_that_is_behind_is_waited_for_and_named(log, address):
    """The check answers about a moment that is stored, or says what is missing."""
    async with running_sink(log.bus, address):
        await a_small_run(log)
        await until_stored(log.bus, "decisions")
    await log.admit("new", 1)
    with pytest.raises(WaitTimeout, match=r"tasks\["):
        await check(log.bus, address, SystemClock(), RUN, wait_s=0.5)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_sql_and_schemas_agree_on_random_runs(log, address, seed):
    """Both definitions of the dispositions give the same counts and find fault with the same runs."""
    await a_random_run(log, random.Random(seed))
    report = await report_of(log, address)
    ledger = log.expected()
    assert ledger.counts() == report.counts
    assert bool(ledger.violations) is bool(report.violations), (ledger.violations, report.violations)


async def a_random_run(log, dice):
    """Groups end in any way; trainers come and go, some fenced; groups are trained on, dropped, left."""
    epochs = [await log.start()]
    waiting = {}
    for number in range(60):
        group = f"g{number}"
        await log.admit(group, 3)
        for sample in range(dice.choice((2, 3, 3))):
            outcome = dice.choice((DONE, DONE, DONE, *OTHERS))
            offset = await log.end_sample(group, sample, outcome)
            if outcome is DONE:
                waiting[group, sample] = offset
            if dice.random() < 0.2:
                await log.end_sample(group, sample, dice.choice(OTHERS))
        if dice.random() < 0.05:
            epochs.append(await log.start())
        move = dice.random()
        if move < 0.25:
            chosen = dice.sample(sorted(waiting), len(waiting) // 2)
            trained = [(*key, waiting.pop(key)) for key in chosen]
            await log.step(epochs[-1], number, trained, [(*key, at) for key, at in waiting.items()])
        elif move < 0.4:
            dropped = [(*key, waiting.pop(key)) for key in list(waiting) if key[0] == group]
            reason = dice.choice(tuple(DropReason))
            await log.decide(GroupDropped(
                run=RUN, epoch=epochs[-1], position=log.end, group=group, reason=reason, members=refs(dropped)
            ))  # fmt: skip
        elif move < 0.46:
            await log.decide(Branch(
                run=RUN, epoch=epochs[-1], from_step=dice.randrange(number + 1), position=log.end
            ))  # fmt: skip
        elif move < 0.5 and len(epochs) > 1:
            await log.step(epochs[0], number, [("g0", 0, 0)])
    if dice.random() < 0.5:
        unused = refs((*key, at) for key, at in waiting.items())
        await log.decide(RunEnded(run=RUN, epoch=epochs[-1], position=log.end, step=60, reason="done", unused=unused))
