"""Curricula by success: a phase ends by what the log says, is written down, and is the same whoever makes it again."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from mortal import Fate, MortalBus, mortal
from synthetic_run import (
    RUN,
    SAMPLES,
    Killed,
    Sampler,
    decisions,
    live,
    memory_bus,
    records_of,
    run_config,
    task,
    trajectory,
)

from infra.bus import TopicPartition
from infra.clock import SystemClock
from infra.wire import Publisher
from schemas.control import Credit
from schemas.decisions import GroupDropped, StepDecided
from schemas.messages import Shaping
from schemas.partition import partition_for
from schemas.topics import CONTROL, DECISIONS, TRAJECTORIES
from trainer import loop
from trainer.replay import replay

CLOCK = SystemClock()
CURRICULUM = {"horizons": [4, 8, 12], "weights": [{"format": 1.0}, {}, {}], "success": 0.4, "success_groups": 7}


def config_of(tmp_path, model, name="one", **changes):
    return run_config(
        tmp_path, model, name, curriculum={**CURRICULUM, **changes}, stop={"max_steps": 12}, checkpoints={"every": 2}
    )


async def recorded_bus(phases=(0,) * 10 + (1,) * 3 + (0,) * 4 + (1,) * 8 + (2,) * 20):
    """Return a bus with groups that were admitted in these phases, interleaved; half of the samples succeed."""
    bus, draw = await memory_bus(), random.Random(3)
    publisher = Publisher(bus, CLOCK, "test")
    pending = [(group, sample) for group in range(len(phases)) for sample in range(SAMPLES)]
    pending.sort(key=lambda item: item[0] + draw.random() * 2)
    for group, sample in pending:
        stamped = msgspec.structs.replace(task(group, sample), phase=phases[group])
        await publisher.publish(TRAJECTORIES, trajectory(stamped, float(draw.random() < 0.6)))
    return bus


async def train(config, bus, **options):
    async with asyncio.timeout(60):
        return await loop.run(config, bus, CLOCK, **options)


async def phases(bus):
    """Return (step, phase after it, batch) of each live step."""
    log = await live(bus)
    return [(d.step, d.phase, d.digest) for d in log if isinstance(d, StepDecided)]


async def credits_of(bus):
    control = await records_of(bus, CONTROL, TopicPartition("control", 0))
    return [record for record in control if isinstance(record, Credit)]


async def test_a_phase_ends_by_the_success_of_its_own_groups(model, tmp_path):
    """Each step says which phase follows, and the credit that is given then stamps it with its weights."""
    bus = await recorded_bus()
    await train(config_of(tmp_path, model), bus)

    found = [phase for _, phase, _ in await phases(bus)]
    assert found == sorted(found)
    assert set(found) == {0, 1, 2}
    weights = {0: Shaping(weights={"format": 1.0})}
    stamped = await credits_of(bus)
    assert all((c.horizon, c.shaping) == (4 + 4 * c.phase, weights.get(c.phase)) for c in stamped)
    assert {c.phase for c in stamped} == {0, 1, 2}
    assert (await replay(bus, CLOCK, RUN)).all_equal


async def test_a_phase_that_is_not_passed_stays(model, tmp_path):
    """No clock and no number of steps ends it, unless told."""
    bus = await recorded_bus()
    await train(config_of(tmp_path, model, success=1.0), bus)

    assert {phase for _, phase, _ in await phases(bus)} == {0}


async def test_a_run_without_such_stages_writes_none(model, tmp_path):
    """By steps they follow from the configuration, as ever."""
    bus = await recorded_bus()
    config = run_config(tmp_path, model, curriculum={"horizons": [4, 8], "every": 2})
    await train(config, bus)

    assert [phase for _, phase, _ in await phases(bus)] == [None] * 4
    assert [c.phase for c in await credits_of(bus)][-1] == 1


@pytest.mark.parametrize(
    ("instant", "skip"),
    [("after step", 2), ("before step", 4), ("before a file", 5), ("after version", 5), ("after credit", 9)],
)
async def test_a_trainer_that_was_killed_ends_its_stages_at_the_same_steps(model, tmp_path, instant, skip):
    """What has been counted is in the checkpoint, the rest in the log."""
    calm, bus = await recorded_bus(), await recorded_bus()
    await train(config_of(tmp_path, model, "calm"), calm)
    config, fate = config_of(tmp_path, model, "killed"), Fate(when=instant, skip=skip)
    with mortal(fate), pytest.raises(Killed):
        await train(config, MortalBus(bus, fate))
    await train(config, bus, resume=True)

    assert await phases(bus) == await phases(calm)
    assert (await replay(bus, CLOCK, RUN)).all_equal


async def test_replay_finds_a_phase_that_does_not_follow_from_the_log(model, tmp_path):
    """A decision that says another one than the groups do is named."""
    bus, other = await recorded_bus(), await recorded_bus()
    await train(config_of(tmp_path, model), bus)
    publisher, part = Publisher(other, CLOCK, "test"), partition_for(RUN, DECISIONS.partitions)
    for _, decision in await decisions(bus):
        told = isinstance(decision, StepDecided) and decision.step == 3
        changed = msgspec.structs.replace(decision, phase=decision.phase + 1) if told else decision
        await publisher.publish(DECISIONS, changed, partition=part)

    found = (await replay(other, CLOCK, RUN)).first_difference

    assert (found.step, found.cause) == (3, "phase 1 of the curriculum follows, phase 2 was recorded")


# ---- what the feeder learns of rows


async def outcomes(bus):
    """Return group -> (row, success) as decisions tell it."""
    found = {}
    for decision in await live(bus):
        if isinstance(decision, StepDecided):
            groups = dict.fromkeys(member.group for member in decision.members)
            found |= dict(zip(groups, decision.rows, strict=bool(decision.rows)))
        if isinstance(decision, GroupDropped) and decision.row:
            found[decision.group] = decision.row
    return found


async def test_decisions_say_what_rows_achieved_where_the_feeder_chooses_by_it(model, tmp_path):
    """Kept groups and dropped ones; the credit names the last decision that it knows."""
    bus = await recorded_bus()
    config = run_config(tmp_path, model, curriculum={"difficulty": {"floor": 0.2}})
    await train(config, bus)

    found = await outcomes(bus)
    assert len(found) >= 8
    assert all(group == f"g{told.row:04d}" for group, told in found.items())
    log = dict(await decisions(bus))
    drops = {d.group for d in log.values() if isinstance(d, GroupDropped)}
    assert drops <= found.keys()
    assert all(found[group].success in {0.0, 1.0} for group in drops)
    known = [credit.decided for credit in await credits_of(bus)]
    assert known == sorted(known)
    assert set(known) <= set(log)


async def test_decisions_of_other_runs_say_nothing_of_rows(model, tmp_path):
    """Nobody asks for it."""
    bus = await recorded_bus()
    await train(run_config(tmp_path, model), bus)

    assert await outcomes(bus) == {}


# ---- a live run


class Pupil(Sampler):
    """A policy that can do what is easy: groups of the first phase mostly succeed, those of the second mostly fail."""

    async def _end(self, made):
        credit = self._control.get(f"credit/{RUN}", Credit)
        stamped = msgspec.structs.replace(made.task, phase=credit.phase, horizon=credit.horizon)
        succeeds = self._draw.random() < (0.8 if credit.phase == 0 else 0.2)
        outcome = msgspec.structs.replace(made.outcome, success=float(succeeds), reward=float(succeeds))
        await super()._end(msgspec.structs.replace(made, task=stamped, outcome=outcome))


async def test_a_live_run_waits_at_the_phase_that_it_cannot_do(model, tmp_path):
    """It leaves the first one at once; its log replays."""
    bus = await memory_bus()
    pupil = Pupil(bus, seed=1)
    config = config_of(tmp_path, model, success=0.6)
    _, result = await asyncio.gather(pupil.run(), train(config, bus))

    assert result.reason == "12 steps made"
    found = [phase for _, phase, _ in await phases(bus)]
    assert (found[0], found[-1]) == (0, 1)
    assert (await replay(bus, CLOCK, RUN)).all_equal
