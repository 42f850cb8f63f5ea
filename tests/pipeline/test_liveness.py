"""A run lives on while something is away or stands still: trainer, feeder, stages, hand-over of weights together."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from synthetic_run import failure, memory_bus, run_config, task

from infra.clock import SystemClock
from infra.config import Config, PolicyConfig, StageConfig
from infra.control import ControlView
from infra.envhost.host import HostLimits
from infra.envhost.lease import LeaseLimits
from infra.inference.sync import WeightSync
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from producers.feeder import Feeder
from producers.generated import GeneratedSource
from producers.publish import ensure_manifest
from schemas.control import Breaker, RunManifest
from schemas.decisions import GroupDropped, StepDecided
from schemas.outcome import Completed
from schemas.topics import CONTROL, DECISIONS, EPISODES, ROLLOUTS, TABLE, TASKS, TRAJECTORIES
from stages.handlers.keydoor import WORDS
from stages.handlers.registry import environment
from stages.pipeline import Outside, Pipeline
from stages.run.render import Renderer
from tests.away import AwayHost
from tests.fast_clock import FastClock
from tests.logs import read_all, wait_until
from tests.pipeline.faulty import FaultyPolicy
from tests.served import put_in_place
from trainer import loop
from trainer.algorithm_config import AlgorithmConfig
from trainer.credit import credit
from trainer.models import Shape, create_wordlevel_model

RUN, GROUPS, SAMPLES, STEPS = "r", 2, 2, 3

LAGS = pytest.mark.parametrize("max_lag", [0, 1, 8])
"""Synchronous, one batch ahead, far ahead."""

LONG_LEASES = HostLimits(leases=LeaseLimits(created_s=1e6, claimed_s=1e6))
"""No lease runs out because the machine is slow."""

PATIENT = Config(
    policy=PolicyConfig(wait_s=604_800), init=StageConfig(max_in_flight=8), run=StageConfig(max_in_flight=8)
)
"""Nobody gives up because the machine is slow: what ends a wait here is the breaker."""

LIMIT_S = 100.0
"""Longest wait for a run of three small steps, seconds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model that knows the words of the hunt."""
    directory = tmp_path_factory.mktemp("model") / "m"
    shape = Shape(hidden=16, layers=1, heads=2, intermediate=32, context=512)
    create_wordlevel_model(directory, seed=0, words=[*sorted(WORDS), "hello"], shape=shape)
    return directory


class World:
    """A run in one process, on the memory log."""

    def __init__(self, model):
        self.clock = FastClock()
        self.bus = MemoryBus(self.clock)
        self.renderer = Renderer(model)
        self.policy = FaultyPolicy(self.renderer)
        self.host = AwayHost(environment, clock=self.clock, limits=LONG_LEASES)
        outside = Outside(host=self.host, policy=self.policy, renderer=self.renderer)
        self.pipeline = Pipeline(self.bus, self.clock, PATIENT, outside)
        self.source = GeneratedSource("keydoor", {"size": 4})

    @asynccontextmanager
    async def working(self, *more):
        """Keep the stages, the feeder and whatever else at work while the block runs."""
        running = [asyncio.create_task(work) for work in (self.pipeline.run(), *more)]
        running.append(asyncio.create_task(Feeder(self.bus, self.clock, RUN, self.source).run()))
        try:
            yield
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def publish_manifest(self, **changes):
        """Publish the run's manifest, as its trainer's command does."""
        manifest = RunManifest(run=RUN, seed=5, samples=SAMPLES, paced=True, **changes)
        await ensure_manifest(self.bus, self.clock, Publisher(self.bus, self.clock, "test"), manifest)

    async def grant(self, groups, max_lag):
        """Give credit as a trainer at its first step does, and never again, with its weights served; return it."""
        algorithm = AlgorithmConfig(groups=groups, samples=SAMPLES, max_lag=max_lag)
        given = credit(RUN, 1, algorithm, resolved=0, step=0, versions={0: 0})
        await self.publish_manifest()
        await Publisher(self.bus, self.clock, "trainer").publish(CONTROL, given)
        await put_in_place(self.policy, Path.cwd(), 0, RUN)
        return given

    async def hand_over(self):
        """Load what the trainer announces into the engine."""
        control = ControlView(self.bus, self.clock)
        publisher = Publisher(self.bus, self.clock, "policy")
        async with control.following():
            # The engine is no model, and says nothing to a canary that a trainer would.
            await WeightSync(control, self.policy, self.clock, publisher, run=RUN, limit_nats=0).run()

    async def messages(self, topic):
        """Return all messages of a topic."""
        return [(await unpack(topic, record)).message for record in await read_all(self.bus, topic)]

    async def count(self, topic):
        """Return how many records a topic holds."""
        return sum((await self.bus.end_offsets(topic.name)).values())

    async def open_breakers(self):
        """Return how often it was written that a service is away."""
        return sum(isinstance(one, Breaker) and one.open for one in await self.messages(CONTROL))


@asynccontextmanager
async def world_of(model):
    world = World(model)
    await world.bus.create_topics(TABLE)
    async with world.host:
        yield world


async def trained(world, model, tmp_path, max_lag, **changes):
    """Run a run to its end with the real trainer, while `outage` (if any) goes on beside it."""
    outage = changes.pop("outage", None)
    algorithm = {"groups": GROUPS, "samples": SAMPLES, "max_lag": max_lag, "filter": "off", "min_siblings": SAMPLES}
    config = run_config(
        tmp_path, model, algorithm={**algorithm, **changes.pop("algorithm", {})}, stop={"max_steps": STEPS}, **changes
    )
    await world.publish_manifest()
    async with asyncio.timeout(LIMIT_S), world.working(world.hand_over()), asyncio.TaskGroup() as group:
        if outage is not None:
            group.create_task(outage)
        return await loop.run(config, world.bus, SystemClock())


async def assert_nothing_was_lost_to_it(world):
    """Every sample that ended was completed at its first attempt, and every trained one has its own reward."""
    trajectories = await world.messages(TRAJECTORIES)
    assert {(0, Completed)} == {(one.task.attempt, type(one.outcome)) for one in trajectories}
    # The expert opens every door: a reward below 1 would be the outage's.
    assert {1.0} == {one.outcome.reward for one in trajectories}
    steps = [one for one in await world.messages(DECISIONS) if isinstance(one, StepDecided)]
    assert {1.0} == {member.reward for step in steps for member in step.members}


@LAGS
async def test_a_policy_that_is_away_for_a_while_pauses_the_run_and_costs_no_attempt(model, tmp_path, max_lag):
    """RUN stands still and says so, asks now and then, and goes on by itself; nobody gets a reward for the outage."""
    async with world_of(model) as world:
        world.policy.at = {6: world.policy.leave}

        async def outage():
            await wait_until(world.open_breakers, 1, limit_s=LIMIT_S)
            calls, asked = world.policy.asked, world.policy.asked_away
            await wait_until(lambda: world.policy.asked_away, asked + 3, limit_s=LIMIT_S)
            assert calls == world.policy.asked, "only probes ask an engine that is away"
            world.policy.come_back()

        result = await trained(world, model, tmp_path, max_lag, outage=outage())

        assert (STEPS, STEPS) == (result.steps, result.version)
        await assert_nothing_was_lost_to_it(world)


@LAGS
async def test_an_environment_host_that_is_away_for_a_while_pauses_the_run_and_costs_no_attempt(
    model, tmp_path, max_lag
):
    """Neither INIT nor RUN takes anything new; episodes in the middle are begun again in their own attempt."""
    async with world_of(model) as world:

        def leave():
            world.host.away = True

        world.policy.at = {6: leave}

        async def outage():
            await wait_until(world.open_breakers, 1, limit_s=LIMIT_S)
            written = await world.open_breakers()
            await wait_until(world.open_breakers, written + 1, limit_s=LIMIT_S)
            world.host.away = False

        result = await trained(world, model, tmp_path, max_lag, outage=outage())

        assert (STEPS, STEPS) == (result.steps, result.version)
        await assert_nothing_was_lost_to_it(world)


@LAGS
async def test_a_trainer_that_stands_still_bounds_every_topic(model, max_lag):
    """By its credit, to the record: nothing is admitted beyond it, and nothing stays in memory."""
    async with world_of(model) as world:
        bound = (max_lag + 1) * GROUPS * SAMPLES
        given = await world.grant(GROUPS, max_lag)
        async with world.working():
            await wait_until(lambda: world.count(TRAJECTORIES), bound, limit_s=LIMIT_S)
            # The feeder has the next group in its hand: it would publish it at any change.
            for _ in range(3):
                await Publisher(world.bus, world.clock, "trainer").publish(CONTROL, given)
            await world.clock.sleep(20)
            grown = [await world.count(topic) for topic in (TASKS, EPISODES, ROLLOUTS, TRAJECTORIES)]
            environments = (await world.host.counts()).environments

        assert ([bound] * 4, 0) == (grown, environments)


@pytest.mark.parametrize("max_lag", [1, 8])
async def test_a_straggler_does_not_delay_the_steps_of_the_others(model, tmp_path, max_lag):
    """One sample that never ends costs its own group alone: there is no barrier."""
    async with world_of(model) as world:
        world.policy.stuck = {0}
        result = await trained(world, model, tmp_path, max_lag)
        steps = [one for one in await world.messages(DECISIONS) if isinstance(one, StepDecided)]
        trained_groups = {member.group for step in steps for member in step.members}
        (straggler,) = world.policy.held

        assert (STEPS, STEPS * GROUPS) == (result.steps, len(trained_groups))
        assert straggler.split("/")[1] not in trained_groups


async def test_one_straggler_of_64_does_not_delay_the_other_63(model):
    """They end while it is still at its first turn."""
    async with world_of(model) as world:
        world.policy.stuck = {0}
        await world.grant(32, max_lag=0)
        async with world.working():
            await wait_until(lambda: world.count(TRAJECTORIES), 63, limit_s=LIMIT_S)
            before = await world.count(TRAJECTORIES)
            world.policy.release()
            await wait_until(lambda: world.count(TRAJECTORIES), 64, limit_s=LIMIT_S)

        assert before == 63


async def test_one_crash_in_64_keeps_63_results_and_retries_one(model):
    """No step aborts, and no sibling is thrown away."""
    async with world_of(model) as world:
        world.policy.garbage_at = {10}
        await world.grant(32, max_lag=0)
        async with world.working():
            await wait_until(lambda: world.count(TRAJECTORIES), 64, limit_s=LIMIT_S)
        trajectories = await world.messages(TRAJECTORIES)

        assert [0] * 63 + [1] == sorted(one.task.attempt for one in trajectories)
        assert {Completed} == {type(one.outcome) for one in trajectories}


async def test_failures_of_samples_cost_no_group_and_the_waste_is_measured(model, tmp_path):
    """Siblings are tried again one by one: with one answer in twelve broken no group is dropped."""
    async with world_of(model) as world:
        world.policy.garbage_at = set(range(5, 1000, 40))
        result = await trained(world, model, tmp_path, 1)
        dropped = [one for one in await world.messages(DECISIONS) if isinstance(one, GroupDropped)]
        trajectories = await world.messages(TRAJECTORIES)
        ended = {f"{one.task.group}/{one.task.sample}" for one in trajectories}
        wasted = [name for name in world.policy.garbled_names if "/".join(name.split("/")[1:3]) in ended]

        assert (STEPS, [], {Completed}) == (result.steps, dropped, {type(one.outcome) for one in trajectories})
        assert wasted
        assert len(wasted) == sum(one.task.attempt for one in trajectories), "one attempt each, and nothing beside it"


async def test_a_run_whose_samples_all_fail_ends_with_that_cause_and_makes_no_empty_step(model, tmp_path):
    """Nothing to train on is said as what it is: not a step, and not a task that is too hard."""
    bus = await memory_bus()
    publisher = Publisher(bus, SystemClock(), "test")
    for number in range(5):
        for sample in range(3):
            await publisher.publish(TRAJECTORIES, failure(task(number, sample)))
    async with asyncio.timeout(LIMIT_S):
        result = await loop.run(run_config(tmp_path, model, stop={"max_dropped": 5}), bus, SystemClock())

    assert result.steps == 0
    assert "5 groups dropped without a step (5 incomplete): samples do not complete" in result.reason
