"""What other rules make of a recorded log."""

import asyncio

import pytest
from synthetic_run import (
    RUN,
    SAMPLES,
    Killed,
    MortalBus,
    memory_bus,
    record_trajectories,
    run_config,
)

from infra.clock import SystemClock
from infra.errors import ConfigError
from trainer import loop
from trainer.what_if import what_if

CLOCK = SystemClock()


@pytest.fixture
async def bus(model, tmp_path):
    """Return a bus with a finished run of 4 steps of 2 groups."""
    bus = await memory_bus()
    await record_trajectories(bus)
    async with asyncio.timeout(60):
        await loop.run(run_config(tmp_path, model), bus, CLOCK)
    return bus


async def test_the_same_rules_make_the_same_of_it(bus):
    """The figures are those of the run."""
    found = await what_if(bus, CLOCK, RUN, ["filter=success"])

    assert found.recorded == found.changed
    assert (found.recorded.steps, found.recorded.groups, found.rules, found.first_other_step) == (4, 8, {}, None)
    assert found.recorded.dropped["filtered"] > 0


async def resumed(tmp_path, model, *, killed_at):
    """Return a bus with a run of 5 steps, the later of 3 groups each and not filtered."""
    bus = await memory_bus()
    await record_trajectories(bus)
    with pytest.raises(Killed):
        await loop.run(run_config(tmp_path, model), MortalBus(bus, killed_at, after=True), CLOCK)
    other = run_config(tmp_path, model, algorithm={"groups": 3, "filter": "off"}, stop={"max_steps": 5})
    async with asyncio.timeout(60):
        await loop.run(other, bus, CLOCK, resume=True)
    return bus


@pytest.mark.parametrize("killed_at", [5, 12, 18])
async def test_each_trainer_of_a_resumed_run_is_judged_by_its_own_rules(model, tmp_path, killed_at):
    """The second one took over at once, after drops whose step was not made yet, and in the middle of the run."""
    bus = await resumed(tmp_path, model, killed_at=killed_at)

    found = await what_if(bus, CLOCK, RUN, [f"samples={SAMPLES}"])

    assert found.recorded == found.changed
    assert (found.recorded.steps, found.rules, found.first_other_step) == (5, {}, None)


async def test_a_rule_is_changed_in_every_trainer_of_a_resumed_run_and_the_others_stay(model, tmp_path):
    """The first two steps had 2 groups anyway; the filter that the second trainer turned off stays off for it alone."""
    bus = await resumed(tmp_path, model, killed_at=18)

    found = await what_if(bus, CLOCK, RUN, ["groups=2"])

    assert found.rules == {"groups": ((2, 3), 2)}
    assert found.first_other_step == 3
    assert found.changed.dropped == found.recorded.dropped == {"filtered": 4}
    assert (found.recorded.groups, found.changed.groups) == (13, 12)  # the thirteenth waits for its step


async def test_without_the_filter_more_groups_are_trained_on(bus):
    """Those without variance come in, so steps are made sooner and hold others."""
    found = await what_if(bus, CLOCK, RUN, ["filter=off"])

    assert found.rules == {"filter": ("success", "off")}
    assert found.changed.groups > found.recorded.groups
    assert "filtered" not in found.changed.dropped
    assert found.first_other_step == 2  # the first batch was full before a group without variance was complete


async def test_complete_groups_alone_make_fewer_steps(bus):
    """Groups with a failed sibling are dropped then."""
    found = await what_if(bus, CLOCK, RUN, [f"min_siblings={SAMPLES}"])

    assert found.changed.dropped["incomplete"] > found.recorded.dropped.get("incomplete", 0)
    assert found.changed.groups <= found.recorded.groups


@pytest.mark.parametrize(
    ("rule", "says"), [("fliter=off", "fliter"), ("filter=maybe", "filter"), ("groups=0", "groups")]
)
async def test_a_rule_that_cannot_be_is_named(bus, rule, says):
    """Nothing is decided."""
    with pytest.raises(ConfigError, match=says):
        await what_if(bus, CLOCK, RUN, [rule])


async def test_a_run_without_a_trainer_is_refused():
    """There are no rules to change."""
    with pytest.raises(ConfigError, match="has no trainer"):
        await what_if(await memory_bus(), CLOCK, RUN, ["filter=off"])
