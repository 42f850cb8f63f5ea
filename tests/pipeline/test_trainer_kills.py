"""Over one recorded log: a trainer that is killed anywhere and resumed decides and learns what an unkilled one does."""

from __future__ import annotations

import asyncio
import functools
import random

import pytest
from mortal import Fate, MortalBus, SleepyBus, mortal
from synthetic_run import (
    Killed,
    decisions,
    learned,
    memory_bus,
    record_trajectories,
    run_config,
    told,
)

from infra.clock import SystemClock
from infra.control import ControlView
from schemas.control import Credit, PolicyVersion
from schemas.topics import TRAJECTORIES
from trainer import loop
from trainer.decision_log import Fenced
from trainer.replay import replay

CLOCK = SystemClock()
STEPS = 4
LEARNING = {"kl": 0.01, "ref_reset": 2, "warmup": 3, "decay": 9, "epochs": 2}
"""Whatever a step depends on beside weights and batch: a reference that moves, a rate that changes."""
KINDS = {
    "whole model": {"algorithm": LEARNING},
    "adapters": {"algorithm": {**LEARNING, "lora": {"rank": 2, "alpha": 4}, "lr": 1e-2}},
    "value head": {"algorithm": {**LEARNING, "estimator": "gae", "credit": "token", "value_lr": 1e-2}},
    "small spool": {"algorithm": LEARNING, "buffer_bytes": 8_000},
}
"""What is trained, and with how much memory for token records: the last one's fits three of a step's six."""
FAST = {"whole model": 4, "adapters": 1, "value head": 1, "small spool": 1}
"""How many seeds of each kind every change must pass."""
SEEDS = [
    pytest.param(kind, seed, marks=pytest.mark.slow if seed >= FAST[kind] else ())
    for kind in KINDS
    for seed in range(20)
]

NAMED = {
    "between decision and step": ("before a step's passes", 2, 2),
    "between step and checkpoint": ("after a step's passes", 1, 2),
    "half of a checkpoint's weights": ("half of model.safetensors in a checkpoint", 1, 1),
    "half of a checkpoint's optimizer": ("half of optimizer.pt in a checkpoint", 1, 2),
    "half of a checkpoint's digests": ("half of files.json in a checkpoint", 1, 2),
    "a checkpoint and no version": ("half of model.safetensors in a version", 2, 1),
    "a version written, not decided": ("before version", 2, 1),
    "a version decided, not announced": ("after version", 3, 2),
    "half of an old checkpoint removed": ("half a removal", 0, 1),
    "the end decided, the credit open": ("after run_ended", 0, 2),
}
"""Moment -> (name of the instant, how many of that name pass before it, steps between two checkpoints)."""
WORST = {"adapters": "half of a checkpoint's weights", "value head": "between decision and step"}
"""Of the other kinds, the moment that every change must pass."""
MOMENTS = [
    pytest.param(kind, what, marks=pytest.mark.slow if kind != "whole model" and what != WORST.get(kind) else ())
    for kind in KINDS
    for what in NAMED
]


class Calm:
    """A run that nothing disturbed."""

    def __init__(self, bus, config, instants):
        self.bus, self.config, self.instants = bus, config, instants


@pytest.fixture(scope="module")
def calm_of(model, tmp_path_factory):
    """What gives a run of a kind to its end on one and the same log, and how many instants it had."""

    @functools.cache
    def calm(kind, every=1):
        async def whole():
            bus = await memory_bus()
            await record_trajectories(bus, groups=24, seed=3)
            directory = tmp_path_factory.mktemp("calm")
            config, fate = configured(directory, model, kind=kind, checkpoints={"every": every}), Fate()
            await train(config, bus, fate)
            return Calm(bus, config, fate.passed)

        return asyncio.run(whole())

    return calm


@pytest.fixture
def calm(calm_of):
    """A run of the whole model."""
    return calm_of("whole model")


def configured(tmp_path, model, name="one", kind="whole model", **changes):
    return run_config(tmp_path, model, name, stop={"max_steps": STEPS}, **{**KINDS[kind], **changes})


async def train(config, bus, fate, **options):
    with mortal(fate):
        async with asyncio.timeout(60):
            return await loop.run(config, MortalBus(bus, fate), CLOCK, **options)


async def same_log(calm):
    """Return a bus that holds the trajectories of the calm run, and no decision."""
    bus = await memory_bus()
    bus.log.copy(calm.bus.log, TRAJECTORIES.name)
    return bus


async def killed_and_resumed(config, bus, fates):
    """Train until nobody dies any more; each trainer has the next fate."""
    for life, fate in enumerate(fates):
        try:
            return await train(config, bus, fate, resume=life > 0)
        except Killed:
            continue
    return await train(config, bus, Fate(), resume=True)


async def killed_as_calm(calm, config, fates):
    """Kill trainers on the log of a calm run, and hold what they come to against it."""
    bus = await same_log(calm)
    await killed_and_resumed(config, bus, fates)
    await assert_as_calm(calm, config, bus)


async def assert_as_calm(calm, config, bus):
    assert told(await decisions(bus)) == told(await decisions(calm.bus))
    assert learned(config) == learned(calm.config)
    assert (await replay(bus, CLOCK, config.run)).all_equal


@pytest.mark.parametrize(("kind", "what"), MOMENTS)
def test_a_trainer_killed_at_the_worst_moments_goes_on_as_if_nothing_had_been(calm_of, model, tmp_path, kind, what):
    """Half of the moments with a checkpoint at every step, half with one at every second."""
    when, skip, every = NAMED[what]
    fate = Fate(when=when, skip=skip)
    checkpoints = {"every": every, "keep": 1}

    asyncio.run(killed_as_calm(calm_of(kind), configured(tmp_path, model, kind=kind, checkpoints=checkpoints), [fate]))

    assert fate.dead


@pytest.mark.parametrize(("kind", "seed"), SEEDS)
def test_a_trainer_killed_anywhere_several_times_goes_on_as_if_nothing_had_been(calm_of, model, tmp_path, kind, seed):
    """The first death is anywhere; the next ones come early, so while its successors catch up."""
    draw = random.Random(f"{kind} {seed}")
    checkpoints = {"every": draw.choice([1, 2, 3]), "keep": draw.choice([1, 2])}
    calm = calm_of(kind, checkpoints["every"])
    fates = [Fate(draw.randint(1, len(calm.instants)))]
    fates += [Fate(draw.randint(1, 25)) for _ in range(draw.randint(0, 2))]

    asyncio.run(killed_as_calm(calm, configured(tmp_path, model, kind=kind, checkpoints=checkpoints), fates))

    assert fates[0].dead


def test_every_kind_learns_something_else_and_memory_changes_nothing(calm_of):
    """Otherwise the kills would try one thing several times."""
    weights = {kind: learned(calm_of(kind).config)[2] for kind in KINDS}

    assert len(set(weights.values())) == len(KINDS) - 1
    assert weights["small spool"] == weights["whole model"]
    again = [kind for kind in KINDS if "before token records are read again" in calm_of(kind).instants]
    assert again == ["small spool"]


# ---- an older trainer wakes up

ASLEEP = {
    "before its decision": ("step", False),
    "behind its decision": ("step", True),
    "before its version": ("version", False),
    "behind its version": ("version", True),
    "before it announces it": ("policy_version", False),
    "before it gives credit": ("credit", False),
}
"""Where -> (the record that it is about to write or has written, which)."""


@pytest.mark.parametrize("where", ASLEEP)
async def test_a_trainer_that_wakes_up_after_another_took_over_changes_nothing(calm, model, tmp_path, where):
    """It falls asleep in its second step; its successor ends the run; then it wakes and says why it ends."""
    bus = await same_log(calm)
    asleep = SleepyBus(bus, *ASLEEP[where])
    old = asyncio.create_task(loop.run(configured(tmp_path, model, "old"), asleep, CLOCK))
    await asyncio.wait_for(asleep.sleeping.wait(), 60)
    new = configured(tmp_path, model, "new")
    await train(new, bus, Fate(), resume=True)
    before = told(await decisions(bus)), await announced(bus)

    asleep.wake.set()
    with pytest.raises(Fenced, match="took run 'r' over"):
        await asyncio.wait_for(old, 60)

    assert before == (told(await decisions(bus)), await announced(bus))
    await assert_as_calm(calm, new, bus)


async def announced(bus):
    """Return what policy and feeder make of `control` now."""
    view = ControlView(bus, CLOCK)
    await view.start()
    await view.close()
    return view.get("policy/r", PolicyVersion), view.get("credit/r", Credit)
