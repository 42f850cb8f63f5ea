"""A recorded run, graded and sampled anew."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from infra.clock import SystemClock
from infra.errors import ConfigError
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from producers.collect import outcomes
from producers.publish import ensure_manifest, publish_tasks, tasks_of
from producers.source import Instance
from rollmill.again import moved, resample, rescore
from rollmill.ledger import ledger
from schemas.control import Cancel, RunManifest
from schemas.messages import Task, Trajectory
from schemas.outcome import Boundary, Completed, Failed, FailureKind
from schemas.topics import CONTROL, TABLE, TASKS, TRAJECTORIES
from stages.run.render import Renderer
from tests import toys
from tests.logs import make_task, read_all
from tests.model_directory import word_model
from tests.pipeline.at_work import pipeline_at_work

LIMIT_S = 500.0
"""Longest wait for all outcomes: 20 s of the machine's time."""

MANIFEST = RunManifest(run="old", seed=5, samples=2)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(word_model(tmp_path_factory.mktemp("model"), toys.WORDS))


@pytest.fixture(autouse=True)
def families(tmp_path, monkeypatch):
    """The toy families, installed."""
    toys.install(tmp_path / "site", monkeypatch)


class World:
    """A log on which a pipeline works, with a finished run."""

    def __init__(self, clock, bus):
        self.clock, self.bus = clock, bus

    async def publish(self, *payloads):
        """Publish toys, two samples each, and wait for their outcomes."""
        publisher = Publisher(self.bus, self.clock, "producer")
        manifest = await ensure_manifest(self.bus, self.clock, publisher, MANIFEST)
        for row, payload in enumerate(payloads):
            toy = Instance(visit=0, row=row, family="toy", payload=payload)
            await publish_tasks(publisher, tasks_of(manifest, "toys", toy, now_ms=self.clock.now_ms()))
        return await self.ended("old", 2 * len(payloads))

    async def ended(self, run, count):
        """Return a run's outcomes by place and sibling, once there are so many."""
        manifest = RunManifest(run=run, seed=5, samples=2)
        found = await outcomes(self.bus, self.clock, manifest, count, limit_s=LIMIT_S)
        return {(one.task.row, one.task.sample): one for one in found}


@pytest.fixture
async def world(renderer):
    async with pipeline_at_work(renderer) as (clock, bus):
        yield World(clock, bus)


async def test_the_same_grader_says_the_same(world):
    """Tokens and verdicts are all that a grade is made of, and both are in the log."""
    await world.publish({"length": 2}, {"length": 3, "components": {"said": 0.5}, "success": 0.0})

    found = await rescore(world.bus, world.clock, "old")

    assert (found.graded, found.same, found.other, found.failed, found.left) == (4, 4, 0, 0, 0)
    assert found.success_before == found.success_after == 2.0


async def test_another_grader_is_compared_sample_by_sample(world):
    """What it makes of each, what it fails on, and what had never completed."""
    await world.publish({"length": 2}, {"length": 4}, {"length": 2, "raise_in": "grade"})

    found = await rescore(world.bus, world.clock, "old", grader="harsh_toy")

    assert (found.graded, found.same, found.other, found.failed, found.left) == (4, 0, 2, 2, 2)
    assert [(one.before, one.after) for one in found.named] == [(1.0, 0.25)] * 2
    assert "four is too much" in "".join(found.causes)


async def test_outcomes_that_were_graded_anew_become_the_log_of_a_new_run(world):
    """The same places and tokens under other group ids; the old run is as it was."""
    before = await world.publish({"length": 2}, {"length": 2, "raise_in": "grade"})

    await rescore(world.bus, world.clock, "old", grader="harsh_toy", into="new")
    after = await world.ended("new", 4)

    assert after.keys() == before.keys()
    for place, old in before.items():
        new = after[place]
        assert (new.task.run, new.task.seed) == ("new", old.task.seed)
        if old.transcript is not None:
            assert new.transcript.tokens == old.transcript.tokens
            assert {span.weights_of for span in new.transcript.spans} == {"old"}
        assert new.task.group != old.task.group
    assert {type(one.outcome) for (row, _), one in after.items() if row == 1} == {Failed}
    assert [after[0, sample].outcome.reward for sample in range(2)] == [0.25, 0.25]
    assert isinstance((await world.ended("old", 4))[0, 0].outcome, Completed)


async def test_a_run_that_was_graded_anew_is_conserved_also_where_the_grader_failed(world):
    """Each outcome brings its sample along; a sibling that is missing would keep its group open for ever."""
    await world.publish({"length": 2}, {"length": 4}, {"length": 2, "raise_in": "grade"})

    await rescore(world.bus, world.clock, "old", grader="harsh_toy", into="new")
    after = await world.ended("new", 6)
    found = await ledger(world.bus, world.clock, "new")

    assert ([], {"unread": 2, "failed": 4}) == (found.violations, found.counts())
    assert "four is too much" in after[1, 0].outcome.cause
    assert {"replay"} == {one.stage for one in after.values()}


async def test_tasks_that_are_sampled_anew_draw_the_same_from_the_same_policy(world):
    """Seeds come from the task's place, so an engine that is the same samples the same tokens."""
    before = await world.publish({"length": 2}, {"length": 3})

    published = await resample(world.bus, world.clock, "old", into="again")
    after = await world.ended("again", 4)

    assert published == 4
    for place, old in before.items():
        assert np.array_equal(after[place].transcript.token_ids, old.transcript.token_ids)
        assert after[place].task.admission is None


async def test_a_run_that_has_outcomes_is_not_written_to(world):
    """Neither are two replays mixed, nor a replay with what it replays."""
    await world.publish({"length": 2})
    await rescore(world.bus, world.clock, "old", into="new")

    for again in (
        rescore(world.bus, world.clock, "old", into="new"),
        resample(world.bus, world.clock, "old", into="old"),
    ):
        with pytest.raises(ConfigError, match=r"has outcomes already|with another"):
            await again


async def test_a_cancelled_run_is_not_sampled_anew(world):
    """Its stages would skip every task."""
    await world.publish({"length": 2})
    await Publisher(world.bus, world.clock, "cancel").publish(CONTROL, Cancel(target="again", cause="a typo"))

    with pytest.raises(ConfigError, match=r"'again' is cancelled \(a typo\)"):
        await resample(world.bus, world.clock, "old", into="again")


async def test_an_unknown_grader_is_refused_before_anything_is_written():
    """It would fail on every sample, and leave a new run without any; the known families are named."""
    bus = MemoryBus()
    await bus.create_topics(TABLE)
    await ensure_manifest(bus, SystemClock(), Publisher(bus, SystemClock(), "producer"), MANIFEST)
    before = await bus.end_offsets(CONTROL.name)

    with pytest.raises(ConfigError, match=r"no grader 'nosuch' to grade with, nothing was written: .*known: .*toy"):
        await rescore(bus, SystemClock(), "old", grader="nosuch", into="new")

    assert before == await bus.end_offsets(CONTROL.name)


async def test_an_unknown_run_is_named_with_those_that_are_known(world):
    """A misspelt name reads as one."""
    await world.publish({"length": 2})

    with pytest.raises(ConfigError, match="there is no run 'odl' in this log; known runs: old"):
        await rescore(world.bus, world.clock, "odl")


def test_a_task_keeps_its_place_in_another_run():
    """The group's id follows the run, the rest stays."""
    task = make_task(run="old")
    found: Task = moved(task, "new")

    assert (found.run, found.seed, found.source, found.row, found.payload) == (
        "new",
        task.seed,
        task.source,
        task.row,
        task.payload,
    )


def test_work_that_was_done_again_has_a_group_of_its_own_in_another_run_too():
    """The place it has now is also that of the source's next pass."""
    second_pass = make_task(run="old", visit=1)
    again, other = (msgspec.structs.replace(second_pass, redrive_of=group) for group in ("dead", "other"))

    assert len({moved(task, "new").group for task in (second_pass, again, other)}) == 3
    assert moved(again, "new") == moved(msgspec.structs.replace(again, sample=0), "new")


async def test_a_sample_that_is_made_again_has_all_its_attempts(world):
    """It may be one that failed at its last."""
    task = msgspec.structs.replace(make_task(run="old", family="toy", payload={"length": 2}), attempt=3)
    publisher = Publisher(world.bus, world.clock, "eval")
    await ensure_manifest(world.bus, world.clock, publisher, MANIFEST)
    failed = Failed(kind=FailureKind.ENGINE, boundary=Boundary.POLICY, cause="c")
    await publisher.publish(TRAJECTORIES, Trajectory(task=task, outcome=failed, stage="run"))
    await resample(world.bus, world.clock, "old", into="new")

    tasks = [(await unpack(TASKS, record)).message for record in await read_all(world.bus, TASKS)]
    (found,) = [one for one in tasks if one.run == "new"]
    assert (found.attempt, found.seed) == (0, task.seed)
