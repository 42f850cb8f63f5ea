"""Runs made to go astray: each guard sees its own, says so in the log, and what its rule says is done.

A rate far too large makes the policy fall: its entropy goes, and it runs away from where it began. What repeats itself,
or is paid without doing the task, is made up.
"""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from mortal import Fate, MortalBus, mortal
from synthetic_run import (
    RUN,
    Killed,
    course,
    decisions,
    live,
    memory_bus,
    points,
    record_trajectories,
    run_config,
    task,
    trajectory,
)

from infra.clock import SystemClock
from infra.errors import ConfigError
from infra.wire import Publisher
from schemas.decisions import Action, Alarm, Guard
from schemas.topics import TRAJECTORIES
from schemas.transcript import pack_tokens
from trainer import loop
from trainer.history import History
from trainer.replay import replay

CLOCK = SystemClock()
TOO_FAST = {"lr": 0.1, "clip_norm": 100.0, "epochs": 4}
"""Makes a policy collapse within a few steps."""


async def recorded_bus(groups=100, **options):
    bus = await memory_bus()
    await record_trajectories(bus, groups=groups, **options)
    return bus


async def bus_of(*trajectories):
    """Return a bus that holds these."""
    bus = await memory_bus()
    publisher = Publisher(bus, CLOCK, "test")
    for made in trajectories:
        await publisher.publish(TRAJECTORIES, made)
    return bus


async def train(config, bus, **options):
    async with asyncio.timeout(60):
        return await loop.run(config, bus, CLOCK, **options)


async def alarms(bus):
    return [decision for decision in await live(bus) if isinstance(decision, Alarm)]


async def figures(bus, name):
    """Return (step, value, labels) of each point of a name."""
    return [(point.step, point.value, point.labels) for point in await points(bus) if point.name == name]


# ---- each guard, on a run that falls into what it watches


async def test_a_policy_whose_entropy_collapses_goes_back_with_half_the_rate(model, tmp_path):
    """To the step before it fell: what was trained since is undone, and the log says why."""
    bus = await recorded_bus()
    guards = {"entropy": {"bound": 1.0, "steps": 2, "action": "back"}}
    await train(run_config(tmp_path, model, algorithm=TOO_FAST, stop={"max_steps": 8}, guards=guards), bus)

    entropies = await figures(bus, "trainer.entropy_nats")
    assert entropies[0][1] > 2.5
    (branch, *_) = History.of(await decisions(bus)).branches
    [(at, value, labels), *_] = await figures(bus, "trainer.alarm_value")
    assert value < 1.0
    assert labels == {"guard": "entropy", "action": "back"}
    assert branch.from_step == at - 3
    assert branch.lr_scale == 0.5
    assert branch.cause.startswith("entropy of ")
    assert branch.cause.endswith(" nats, below 1, 2 steps in a row")
    assert (await replay(bus, CLOCK, RUN)).all_equal


async def test_a_policy_that_collapses_again_ends_the_run(model, tmp_path):
    """It goes back once; a rate a hundred times too large is still too large when it is halved."""
    bus = await recorded_bus()
    guards = {"entropy": {"bound": 1.0, "steps": 2, "action": "back"}}
    result = await train(run_config(tmp_path, model, algorithm=TOO_FAST, stop={"max_steps": 30}, guards=guards), bus)

    assert result.reason.startswith("ended by its guard: entropy of ")
    assert len(History.of(await decisions(bus)).branches) == 1
    assert [alarm.action for alarm in await alarms(bus)][-1:] == [Action.STOP]


async def test_a_policy_that_runs_away_from_its_reference_is_slowed_down(model, tmp_path):
    """The rate of all later steps is halved, and once more while that does not help."""
    bus = await recorded_bus()
    guards = {"kl": {"bound": 0.05, "steps": 1, "action": "slow"}}
    config = run_config(
        tmp_path, model, algorithm={"lr": 0.05, "clip_norm": 100.0, "kl": 1e-6}, stop={"max_steps": 5}, guards=guards
    )
    await train(config, bus)

    found = await alarms(bus)
    assert [alarm.guard for alarm in found] == [Guard.KL] * len(found)
    assert len(found) >= 2
    assert all(alarm.value > 0.05 for alarm in found)
    halved = [sum(alarm.step < step for alarm in found) for step in range(1, 6)]
    rates = [rate for _, rate, _ in await figures(bus, "trainer.learning_rate")]
    assert rates == pytest.approx([0.05 / 2**times for times in halved])


async def test_episodes_that_repeat_themselves_are_told_of(model, tmp_path):
    """All sampled tokens are the same one; the run goes on, and nobody is told twice."""
    made = [trajectory(task(number, sample), float(sample == 0)) for number in range(8) for sample in range(3)]
    same = pack_tokens(np.full(10, 9))
    bus = await bus_of(
        *(msgspec.structs.replace(one, transcript=msgspec.structs.replace(one.transcript, tokens=same)) for one in made)
    )
    guards = {"repetition": {"bound": 0.5, "steps": 2}, "ngram": 2}
    result = await train(run_config(tmp_path, model, guards=guards), bus)

    assert result.reason == "4 steps made"
    (alarm,) = await alarms(bus)
    assert (alarm.step, alarm.guard, alarm.action) == (2, Guard.REPETITION, Action.TELL)
    # Five sampled tokens have four pairs, of which one is new.
    assert alarm.value == pytest.approx(0.75)
    assert [value for _, value, _ in await figures(bus, "trainer.repetition_share")] == pytest.approx([0.75] * 4)


def farmed_samples():
    """Return samples that fail, and earn by what they do on the way."""
    return [
        trajectory(task(number, sample), 0.0, turn_rewards=(0.3, 0.3 * sample))
        for number in range(8)
        for sample in range(3)
    ]


async def test_a_policy_that_is_paid_without_doing_the_task_ends_the_run(model, tmp_path):
    """Milestones are paid again and again: failed siblings earn more than one of a kind could."""
    bus = await bus_of(*farmed_samples())
    guards = {"farming": {"bound": 0.5, "steps": 2, "action": "stop"}}
    result = await train(run_config(tmp_path, model, algorithm={"filter": "off"}, guards=guards), bus)

    cause = "samples that failed earned 0.6 in the mean, above 0.5, 2 steps in a row"
    assert (result.steps, result.reason) == (2, f"ended by its guard: {cause}")
    assert [alarm.cause for alarm in await alarms(bus)] == [cause]
    assert [value for _, value, _ in await figures(bus, "trainer.unearned_reward_mean")] == pytest.approx([0.6, 0.6])


async def test_a_guard_that_ends_the_run_is_stronger_than_one_that_goes_back(model, tmp_path):
    """Both are due at one step: both are written down, and the run ends."""
    bus = await bus_of(*farmed_samples())
    guards = {
        "repetition": {"bound": -1.0, "steps": 2, "action": "back"},
        "farming": {"bound": 0.5, "steps": 2, "action": "stop"},
    }
    result = await train(run_config(tmp_path, model, algorithm={"filter": "off"}, guards=guards), bus)

    assert (result.steps, result.reason.partition(":")[0]) == (2, "ended by its guard")
    assert {alarm.guard for alarm in await alarms(bus)} == {Guard.REPETITION, Guard.FARMING}


async def test_a_policy_that_is_no_better_than_a_rule_is_told_of(model, tmp_path):
    """One success in three, beside a rule that has one in two."""
    bus = await bus_of(
        *(trajectory(task(number, sample), float(sample == 0)) for number in range(8) for sample in range(3))
    )
    guards = {"baseline": {"bound": 0.5, "rule": "random", "steps": 2}}
    await train(run_config(tmp_path, model, stop={"success_groups": 4}, guards=guards), bus)

    (alarm,) = await alarms(bus)
    # Four groups are complete at the second step.
    assert (alarm.step, alarm.guard) == (3, Guard.BASELINE)
    assert alarm.cause == "success of 0.333, not above the 0.500 of random, 2 steps in a row"


async def test_a_calm_run_has_no_alarm(model, tmp_path):
    """All guards watch, and nothing is written."""
    bus = await recorded_bus(groups=30)
    guards = {
        "entropy": {"bound": 0.1, "action": "back"},
        "repetition": {"bound": 0.9, "action": "stop"},
        "farming": {"bound": 0.5, "action": "stop"},
        "kl": {"bound": 0.5, "action": "slow"},
        "baseline": {"bound": 0.1, "action": "stop"},
    }
    result = await train(run_config(tmp_path, model, algorithm={"kl": 1e-4}, guards=guards), bus)

    assert result.reason == "4 steps made"
    assert await alarms(bus) == []


async def test_a_rule_that_nobody_has_played_is_refused(model, tmp_path):
    """The trainer knows no families."""
    config = run_config(tmp_path, model, guards={"baseline": {"rule": "random"}})

    with pytest.raises(ConfigError, match="which this program cannot play: start it by `rollmill train`"):
        await train(config, await memory_bus())


# ---- killed around an alarm


def falling(tmp_path, model, name, action):
    """Return a run whose policy falls, with a checkpoint now and then only."""
    return run_config(
        tmp_path,
        model,
        name,
        algorithm=TOO_FAST,
        stop={"max_steps": 7},
        checkpoints={"every": 3},
        guards={"entropy": {"bound": 1.0, "steps": 2, "action": action}},
    )


@pytest.fixture(scope="module", params=["back", "slow", "stop"])
def never_killed(request, model, tmp_path_factory):
    """Return an action, and what a run that is never killed decides with it."""

    async def whole():
        bus = await recorded_bus()
        await train(falling(tmp_path_factory.mktemp("calm"), model, "one", request.param), bus)
        return await course(bus)

    return request.param, asyncio.run(whole())


@pytest.mark.parametrize(
    ("instant", "skip"),
    [("before alarm", 0), ("after alarm", 0), ("after trainer_started", 1), ("before run_ended", 0), ("after step", 5)],
)
async def test_a_trainer_killed_around_an_alarm_is_followed_by_one_that_does_the_same(
    model, never_killed, tmp_path, instant, skip
):
    """The same alarms, the same rates and so the same weights, the same end."""
    action, expected = never_killed
    bus, config, fate = await recorded_bus(), falling(tmp_path, model, "killed", action), Fate(when=instant, skip=skip)
    try:
        with mortal(fate):
            await train(config, MortalBus(bus, fate))
    except Killed:
        await train(config, bus, resume=True)

    assert await course(bus) == expected
