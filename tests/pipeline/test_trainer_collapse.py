"""A run that collapses goes back to its best version once, with half the learning rate, and the log says so."""

from __future__ import annotations

import asyncio

import pytest
from mortal import Fate, MortalBus, mortal
from suites import SUITE, MadeUpSuite
from synthetic_run import (
    RUN,
    Killed,
    course,
    decisions,
    live,
    memory_bus,
    points,
    record_trajectories,
    records_of,
    run_config,
)

from infra.bus import TopicPartition
from infra.clock import SystemClock
from schemas.decisions import Branch, Evaluated, StepDecided
from schemas.dispositions import Disposition, dispositions
from schemas.partition import partition_for
from schemas.topics import TRAJECTORIES
from trainer import loop
from trainer.history import History
from trainer.replay import replay

CLOCK = SystemClock()
FIRST_LINE = {0: 20, 2: 36, 4: 10, 6: 8}
"""Step -> successes of forty, until the run has gone back."""


def collapsing(after=33):
    """Return a suite that falls at steps 4 and 6 of the first line; `after` are solved once the run has gone back."""
    return MadeUpSuite(lambda step, version: FIRST_LINE[step] if version <= 6 else after)


def config_of(tmp_path, model, name="one", **changes):
    return run_config(tmp_path, model, name, evaluation=SUITE, stop={"max_steps": 8}, **changes)


async def recorded_bus():
    bus = await memory_bus()
    await record_trajectories(bus, groups=100)
    return bus


async def train(config, bus, suite, **options):
    async with asyncio.timeout(60):
        return await loop.run(config, bus, CLOCK, evaluator=suite, **options)


async def rates(bus):
    """Return step -> learning rates that it was trained with, one after the other."""
    found = {}
    for point in await points(bus):
        if point.name == "trainer.learning_rate":
            found.setdefault(point.step, []).append(pytest.approx(point.value))
    return found


@pytest.fixture(scope="module")
def calm(model, tmp_path_factory):
    """Return what a run that collapses, and is never killed, decides."""

    async def whole():
        bus = await recorded_bus()
        await train(config_of(tmp_path_factory.mktemp("calm"), model), bus, collapsing())
        return await course(bus)

    return asyncio.run(whole())


async def test_a_run_that_collapses_goes_back_to_its_best_version_with_half_the_rate(model, tmp_path):
    """What was trained since is rolled back, and the steps are made anew from other groups."""
    bus = await recorded_bus()
    result = await train(config_of(tmp_path, model), bus, collapsing())

    history = History.of(await decisions(bus))
    (branch,) = history.branches
    assert (branch.from_step, branch.lr_scale) == (2, 0.5)
    assert branch.cause == "success of 0.250 and 0.200, below 0.900 of step 2 by more than its interval (0.769)"
    assert (result.steps, result.reason, sorted(history.steps)) == (8, "8 steps made", list(range(1, 9)))
    lr = 3e-4
    assert await rates(bus) == {
        **{step: [lr] for step in (1, 2)},
        **{step: [lr, lr / 2] for step in (3, 4, 5, 6)},
        # Step 7 was trained while step 6 was evaluated, and undone before anybody was told of it.
        **{step: [lr / 2] for step in (7, 8)},
    }
    assert sorted(history.evaluations) == [0, 2, 4, 6, 8]
    assert (await replay(bus, CLOCK, RUN)).all_equal


async def test_the_books_hold_what_was_undone(model, tmp_path):
    """Each sample is in one place, and those of the steps that are gone are rolled back."""
    bus = await recorded_bus()
    await train(config_of(tmp_path, model), bus, collapsing())

    first = {}
    partition = TopicPartition("trajectories", partition_for(RUN, TRAJECTORIES.partitions))
    for offset, message in enumerate(await records_of(bus, TRAJECTORIES, partition)):
        first.setdefault((message.task.group, message.task.sample), (offset, message.outcome))
    said = await live(bus)
    ledger = dispositions(first, first, said, has_trainer=True)
    undone = [d for d in said if isinstance(d, StepDecided)][2:7]
    assert ledger.violations == []
    assert ledger.counts()[Disposition.ROLLED_BACK] == sum(len(d.members) for d in undone)


@pytest.mark.parametrize(
    ("instant", "skip"),
    [
        ("before evaluated", 4),  # the gate is the first one
        ("after evaluated", 4),
        ("before branch", 0),
        ("after branch", 0),
        ("before trainer_started", 1),
        ("after trainer_started", 1),
        ("after step", 8),
        ("before version", 9),
    ],
)
async def test_a_trainer_killed_around_its_collapse_is_followed_by_one_that_does_the_same(
    model, calm, tmp_path, instant, skip
):
    """The same branch, the same steps, the same weights: the rate is halved for those after it alone."""
    bus = await recorded_bus()
    config, fate = config_of(tmp_path, model, "killed", checkpoints={"every": 5}), Fate(when=instant, skip=skip)
    with mortal(fate), pytest.raises(Killed):
        await train(config, MortalBus(bus, fate), collapsing())

    await train(config, bus, collapsing(), resume=True)

    assert await course(bus) == calm


async def test_a_run_that_collapses_again_ends(model, tmp_path):
    """It went back once; what it says is for a person. A person may go on with it."""
    bus = await recorded_bus()
    config = config_of(tmp_path, model)
    result = await train(config, bus, collapsing(after=5))

    assert result.reason.startswith("collapsed: success of 0.125 and 0.125, below 0.900 of step 2")
    assert (result.steps, len(History.of(await decisions(bus)).branches)) == (7, 1)
    assert (await train(config, bus, collapsing(after=33), resume=True)).reason == "8 steps made"


async def test_one_bad_evaluation_is_no_collapse(model, tmp_path):
    """The run goes on as if nothing was."""
    bus, suite = await recorded_bus(), MadeUpSuite(lambda step, version: 10 if step in {4, 8} else 36)
    await train(config_of(tmp_path, model), bus, suite)

    log = [decision for _, decision in await decisions(bus)]
    assert not [d for d in log if isinstance(d, Branch)]
    assert [d.step for d in log if isinstance(d, Evaluated)] == [0, 0, 2, 4, 6, 8]


async def test_an_entropy_that_its_floor_cannot_hold_is_a_collapse(model, tmp_path):
    """Twenty words have three nats at most: below half of a floor of ten."""
    bus, suite = await recorded_bus(), MadeUpSuite(lambda step, version: 20 + step)
    result = await train(config_of(tmp_path, model, algorithm={"entropy_floor": 10.0}), bus, suite)

    (branch,) = History.of(await decisions(bus)).branches
    assert (branch.from_step, branch.lr_scale) == (0, 0.5)
    assert "below 0.5 of its floor 10" in branch.cause
    assert result.reason.startswith("collapsed: entropy of")
