"""Cancelled samples: wherever they are, they end at once, once, and nothing else is touched."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from infra.clock import VirtualClock
from infra.config import StageConfig
from infra.envhost.local import LocalEnvHost
from infra.inference.scripted import ScriptedPolicy
from infra.memory import MemoryBus
from infra.stage import Member
from infra.wire import Publisher, unpack
from producers.publish import publish_tasks, tasks_of
from producers.reaper import Reaper
from producers.source import Instance
from schemas.arbiter import Arbiter, Ruling
from schemas.control import Cancel, RunManifest
from schemas.outcome import Cancelled, Completed
from schemas.topics import CONTROL, EPISODES, ROLLOUTS, TABLE, TASKS, TRAJECTORIES
from stages.eval.stage import grade
from stages.handlers.registry import environment
from stages.init.stage import InitStage
from stages.run.render import Renderer
from stages.run.stage import RunStage
from stages.wiring import eval_stage, init_stage, run_stage
from tests import toys
from tests.logs import read_all
from tests.model_directory import word_model
from tests.pools import pool_of

LIMIT_S = 30.0
"""Longest wait of a test for something that takes milliseconds, seconds of the machine."""

STAGES = ("init", "run", "eval")
QUEUES = {"init": TASKS, "run": EPISODES, "eval": ROLLOUTS}
MANIFEST = RunManifest(run="r", seed=5, samples=3)
TOY = Instance(visit=0, row=0, family="toy", payload={"length": 2})
SIBLINGS = tasks_of(MANIFEST, "toys", TOY, now_ms=VirtualClock().now_ms())
GROUP = SIBLINGS[0].group


class HeldPolicy(ScriptedPolicy):
    """An engine whose generations last until the test lets them go on."""

    def __init__(self, renderer):
        super().__init__(lambda *_: renderer.answer("hello").tolist(), tokenizer_digest=renderer.digest)
        self.gate = asyncio.Event()
        self.begun = self.aborted = 0

    async def generate(self, *arguments, **settings):
        """Wait, then answer; a caller that leaves has aborted it."""
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return await super().generate(*arguments, **settings)


class World:
    """A log, a host, an engine, and stages that a test starts and kills one by one."""

    def __init__(self, renderer):
        self.clock = VirtualClock()
        self.bus = MemoryBus(self.clock)
        self.host = LocalEnvHost(environment, clock=self.clock)
        self.policy = HeldPolicy(renderer)
        self.publisher = Publisher(self.bus, self.clock, "test")
        self._renderer = renderer
        self._running = {}

    def member(self, name):
        """Return a new member of a stage."""
        run = RunStage(
            hosts=self.host,
            policy=pool_of(self.clock, self.policy),
            renderer=self._renderer,
            clock=self.clock,
            worker=name,
        )
        stage = {
            "init": init_stage(InitStage(self.host).handle),
            "run": run_stage(run.handle, run.withdraw),
            "eval": eval_stage(grade),
        }[name]
        limits = StageConfig(drain_s=0).limits()
        return Member(stage, self.bus, self.clock, worker=name, limits=limits, first=name == "init")

    def start(self, *names):
        """Start stages, and `reaper`."""
        for name in names:
            service = Reaper(self.bus, self.clock) if name == "reaper" else self.member(name)
            self._running[name] = asyncio.create_task(service.run())

    async def kill(self, *names):
        """End services on the spot; what they had in work is handed out again."""
        running = [self._running.pop(name) for name in names]
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def until(self, condition):
        """Let time pass until a condition holds (or what it awaits)."""
        until = time.monotonic() + LIMIT_S
        while not await condition():
            for name, one in self._running.items():
                assert not one.done(), f"{name} ended: {one}"
            assert time.monotonic() < until, f"waited {LIMIT_S:g} s; on the way: {await self.queued()}"
            await self.clock.advance(0.05)
            await asyncio.sleep(0.001)

    async def queued(self):
        """Return records by topic."""
        topics = (TASKS, EPISODES, ROLLOUTS, TRAJECTORIES)
        return {topic.name: sum((await self.bus.end_offsets(topic.name)).values()) for topic in topics}

    async def reached(self, topic, count):
        """Wait for records on a topic."""

        async def there():
            return (await self.queued())[topic.name] >= count

        await self.until(there)

    async def cancel(self, target):
        """Withdraw."""
        await self.publisher.publish(CONTROL, Cancel(target=target, cause="by request"))

    async def outcomes(self):
        """Return sample -> accepted outcome, and how often each ruling fell."""
        arbiter, accepted, rulings = Arbiter(), {}, Counter()
        for record in await read_all(self.bus, TRAJECTORIES):
            message = (await unpack(TRAJECTORIES, record)).message
            ruling = arbiter.rule(message.task.group, message.task.sample, message.task.payload_digest, record.offset)
            rulings[ruling] += 1
            if ruling is Ruling.ACCEPTED:
                accepted[message.task.sample] = type(message.outcome)
        return accepted, rulings

    async def ended(self, count=3):
        """Wait until this many samples have an outcome, and return them."""

        async def all_there():
            return len((await self.outcomes())[0]) >= count

        await self.until(all_there)
        return (await self.outcomes())[0]

    async def committed(self, stage):
        """Wait until a stage has nothing left to do."""

        async def done():
            ends = await self.bus.end_offsets(QUEUES[stage].name)
            progress = await self.bus.committed(stage, QUEUES[stage].name)
            return all(end == 0 or (part in progress and progress[part].offset == end) for part, end in ends.items())

        await self.until(done)

    async def environments(self, count):
        """Wait until the host holds this many."""

        async def held():
            return (await self.host.counts()).environments == count

        await self.until(held)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(word_model(tmp_path_factory.mktemp("model"), toys.WORDS))


@pytest.fixture
def families(tmp_path, monkeypatch):
    toys.install(tmp_path / "site", monkeypatch)


@pytest.fixture
async def world(renderer, families):
    world = World(renderer)
    await world.bus.create_topics(TABLE)
    async with world.host:
        yield world
        await world.kill(*world._running)


@asynccontextmanager
async def held(monkeypatch, method):
    """Hold a synchronous method of the toys in its thread; gives what counts those that are inside."""
    go_on, inside = threading.Event(), []
    original = getattr(toys.Toy, method)

    def slow(self, *arguments):
        inside.append(1)
        assert go_on.wait(LIMIT_S * 4)
        return original(self, *arguments)

    monkeypatch.setattr(toys.Toy, method, slow)
    try:
        yield inside
    finally:
        go_on.set()


def is_as_long_as(items, count):
    async def reached():
        return len(items) >= count

    return reached


CANCELLED_ONE = {0: Completed, 1: Cancelled, 2: Completed}


@pytest.mark.parametrize("stage", STAGES)
async def test_what_is_queued_is_skipped_and_its_siblings_go_on(world, stage):
    """Before each stage: the record lies in its topic when the cancel comes, and no reaper helps."""
    before = STAGES[: STAGES.index(stage)]
    world.policy.gate.set()
    await publish_tasks(world.publisher, SIBLINGS)
    world.start(*before)
    await world.reached(QUEUES[stage], 3)
    await world.cancel(f"r/{GROUP}/1")
    world.start(*STAGES[len(before) :])

    assert CANCELLED_ONE == await world.ended()
    await world.environments(0)
    for name in STAGES:
        await world.committed(name)


async def test_a_generation_is_aborted_and_its_environment_closed(world):
    """Running in RUN; the siblings' generations go on to the end."""
    await publish_tasks(world.publisher, SIBLINGS)
    world.start(*STAGES)
    await world.until(lambda: _at_least(world.policy, 3))
    await world.cancel(f"r/{GROUP}/1")
    first = await world.ended(1)
    await world.environments(2)
    world.policy.gate.set()

    assert ({1: Cancelled}, 1) == (first, world.policy.aborted)
    assert CANCELLED_ONE == await world.ended()
    await world.environments(0)
    assert {"closed": 3} == {k: v for k, v in (await world.host.counts()).leases.items() if v}


async def _at_least(policy, count):
    return policy.begun >= count


@pytest.mark.parametrize(("stage", "method"), [("init", "init"), ("eval", "grade")])
async def test_a_slow_handler_in_a_thread_is_not_waited_for(world, monkeypatch, stage, method):
    """It cannot be stopped; its result is dropped, its slot is free, and the outcome is there while it still runs."""
    world.policy.gate.set()
    await publish_tasks(world.publisher, SIBLINGS[:1])
    async with held(monkeypatch, method) as inside:
        world.start(*STAGES)
        await world.until(is_as_long_as(inside, 1))
        await world.cancel("r")
        found = await world.ended(1)
        await world.committed(stage)

    assert {0: Cancelled} == found
    await world.kill(*STAGES)
    assert {Ruling.ACCEPTED: 1} == (await world.outcomes())[1]


@pytest.mark.parametrize("stage", STAGES)
async def test_cancelled_then_crashed_then_started_again_it_is_still_cancelled(world, monkeypatch, stage):
    """In work, the stage dies, the cancel comes while nobody runs: the next one skips what it is handed again."""
    method = {"init": "init", "eval": "grade"}.get(stage)
    if method:
        world.policy.gate.set()
    await publish_tasks(world.publisher, SIBLINGS[:2])
    async with held(monkeypatch, method) if method else _nothing() as inside:
        world.start(*STAGES)
        await world.until(is_as_long_as(inside, 2) if method else lambda: _at_least(world.policy, 2))
        await world.kill(*STAGES)
        await world.cancel(f"r/{GROUP}")
        world.start(*STAGES)
        found = await world.ended(2)

    assert {0: Cancelled, 1: Cancelled} == found
    for name in STAGES:
        await world.committed(name)
    assert {Ruling.ACCEPTED: 2} == (await world.outcomes())[1]


@asynccontextmanager
async def _nothing():
    yield []


async def test_whoever_says_it_first_there_is_one_accepted_outcome(world):
    """Stages and reaper at once, a task published twice, a cancel repeated: later records are superseded."""
    await publish_tasks(world.publisher, SIBLINGS)
    world.start(*STAGES, "reaper")
    await world.until(lambda: _at_least(world.policy, 3))
    await world.cancel("r")
    await world.cancel(f"r/{GROUP}")
    await publish_tasks(world.publisher, SIBLINGS)
    await world.ended()
    for name in STAGES:
        await world.committed(name)
    accepted, rulings = await world.outcomes()

    assert {0: Cancelled, 1: Cancelled, 2: Cancelled} == accepted
    assert 3 == rulings[Ruling.ACCEPTED]
    assert {Ruling.ACCEPTED, Ruling.SUPERSEDED} >= set(rulings)
    await world.environments(0)


async def test_the_reaper_alone_ends_what_is_queued(world):
    """No stage is alive; samples admitted later end too, and other runs wait on."""
    await publish_tasks(world.publisher, SIBLINGS[:2])
    await world.cancel("r")
    world.start("reaper")
    await world.ended(2)
    await publish_tasks(world.publisher, SIBLINGS[2:])

    assert {0: Cancelled, 1: Cancelled, 2: Cancelled} == await world.ended()


async def test_a_closed_lease_that_run_finds_first_needs_no_record_of_it(world):
    """The host may know of the cancel before RUN does: RUN commits, and the reaper ends the sample."""
    await publish_tasks(world.publisher, SIBLINGS[:1])
    world.start("init")
    await world.reached(EPISODES, 1)
    (lease,) = [lease.id for lease in world.host.host._table.open()]
    await world.host.withdraw(lease)
    world.start("run", "eval")
    await world.committed("run")
    before = await world.outcomes()
    world.start("reaper")
    await world.cancel("r")

    assert ({}, 0) == (before[0], world.policy.begun)
    assert {0: Cancelled} == await world.ended(1)
