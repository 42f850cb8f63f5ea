"""Why no batch forms, over logs that lack one thing each."""

import asyncio

import pytest
from synthetic_run import RUN, memory_bus, run_config, task, trajectory

from infra.clock import SystemClock
from infra.errors import ConfigError
from infra.wire import Publisher
from schemas.control import Cancel, Credit, Cursor
from schemas.decisions import TrainerStarted, VersionPublished
from schemas.topics import CONTROL, DECISIONS, TRAJECTORIES
from trainer import loop
from trainer.explain import explain

CLOCK = SystemClock()


class Log:
    """A run's log, written by hand."""

    def __init__(self, bus):
        self.bus = bus
        self._publisher = Publisher(bus, CLOCK, "test")

    async def ended(self, *samples):
        """Publish the outcomes of (group, sample, success)."""
        for group, sample, success in samples:
            await self._publisher.publish(TRAJECTORIES, trajectory(task(group, sample), success))

    async def says(self, *records):
        """Publish to `control`."""
        for record in records:
            await self._publisher.publish(CONTROL, record)

    async def credit(self, up_to):
        """Let the feeder publish so many groups."""
        await self.says(Credit(run=RUN, epoch=0, admit_up_to=up_to, min_version=0, horizon=4, temperature=1.0))

    async def causes(self):
        """Return what is said."""
        return "\n".join((await explain(self.bus, CLOCK, RUN)).causes())


@pytest.fixture
async def log(tmp_path):
    """Return the log of a run whose trainer wants 2 groups of 3 and has not decided anything."""
    bus = await memory_bus()
    config = run_config(tmp_path, tmp_path)
    found = Log(bus)
    publisher = Publisher(bus, CLOCK, "test")
    started = TrainerStarted(run=RUN, config=config.model_dump(mode="json"), start=0, step=0)
    epoch = (await publisher.publish(DECISIONS, started)).offset
    version = VersionPublished(run=RUN, epoch=epoch, step=0, version=0, digest="made up")
    await publisher.publish(DECISIONS, version)
    return found


async def test_a_run_without_a_trainer_is_refused():
    """There are no rules to explain anything by."""
    with pytest.raises(ConfigError, match="no trainer ever started"):
        await explain(await memory_bus(), CLOCK, RUN)


async def test_a_begun_group_is_named_with_the_sibling_that_it_misses(log):
    """One group is complete, one misses its last sample."""
    await log.ended((0, 0, 0.0), (0, 1, 1.0), (0, 2, 0.0), (1, 0, 0.0), (1, 1, 1.0))

    found = await explain(log.bus, CLOCK, RUN)

    assert (found.step, found.needed, found.kept, found.begun) == (1, 2, 1, 1)
    assert found.missing == {"g0001": (2,)}
    assert "step 1 takes 2 groups, 1 are complete: 1 to go" in found.causes()[0]
    assert "`rollmill show r/g0001/2`" in "\n".join(found.causes())


async def test_groups_without_variance_say_whether_the_tasks_are_too_easy_or_too_hard(log):
    """All siblings of both groups fail."""
    await log.ended(*((group, sample, 0.0) for group in (0, 1) for sample in range(3)))

    said = await log.causes()

    assert "2 groups were dropped as filtered since the last step" in said
    assert "Mean success is 0.00, so the tasks are too hard" in said


async def test_a_feeder_that_may_publish_more_is_named(log):
    """Credit for 6 groups, 1 published and under way."""
    await log.credit(6)
    await log.says(Cursor(run=RUN, admitted=1))

    said = await log.causes()

    assert "may publish 6 groups and has published 1" in said
    assert "1 admitted groups have no outcome yet" in said


async def test_a_feeder_that_never_came_and_a_credit_that_was_never_given_are_told_apart(log):
    """Each is its own fault."""
    assert "no trainer has given the feeder credit yet" in await log.causes()

    await log.credit(4)

    assert "no feeder has published a group yet" in await log.causes()


async def test_a_batch_that_is_complete_is_due_and_nothing_else_is_said(log):
    """The log decides it; what is missing is a trainer."""
    await log.ended(*((group, sample, float(sample == 0)) for group in (0, 1) for sample in range(3)))
    await log.ended((2, 0, 1.0))

    found = await explain(log.bus, CLOCK, RUN)

    assert (found.due.step, found.due.position, found.due.behind, found.step) == (1, 6, 1, 1)
    (cause,) = found.causes()
    assert "the batch of step 1 is complete since offset 5" in cause
    assert "does not run" in cause


async def test_a_cancelled_run_says_who_cancelled_it(log):
    """It is given no more tasks, so nothing will come."""
    await log.says(Cancel(target=RUN, cause="too expensive"))

    assert "the run is cancelled (too expensive)" in await log.causes()


async def test_a_run_that_ended_says_why_and_how_to_go_on(model, tmp_path):
    """There is no next step."""
    bus = await memory_bus()
    log = Log(bus)
    await log.ended(*((group, sample, float(sample == 0)) for group in range(4) for sample in range(3)))
    async with asyncio.timeout(60):
        await loop.run(run_config(tmp_path, model, stop={"max_steps": 2}), bus, CLOCK)

    (cause,) = (await explain(bus, CLOCK, RUN)).causes()

    assert "the run has ended (2 steps made)" in cause
    assert "--resume" in cause
