"""The whole path in one process: every task gets exactly one outcome, whatever breaks on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from infra.config import Config, StageConfig
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from producers.collect import outcomes
from producers.generated import GeneratedSource
from producers.publish import ensure_manifest, publish_source, publish_tasks, tasks_of
from producers.source import Instance
from rollmill.ledger import ledger
from schemas import transcript
from schemas.arbiter import Arbiter, Ruling
from schemas.control import RunManifest
from schemas.outcome import Completed, Failed, FailureKind
from schemas.topics import DEAD, TABLE, TASKS, TRAJECTORIES
from stages.handlers.keydoor import WORDS
from stages.pipeline import Outside, Pipeline
from stages.run.render import Renderer
from tests import toys
from tests.fast_clock import FastClock
from tests.logs import read_all
from tests.model_directory import word_model
from tests.pipeline.faulty import FaultyPolicy, RestartingHost

LIMIT_S = 500.0
"""Longest wait for all outcomes: 20 s of the machine's time."""

HARD_STOP = Config(init=StageConfig(drain_s=0), run=StageConfig(drain_s=0), eval=StageConfig(drain_s=0))
"""A stop hands back what is in work, in whatever state it is."""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(word_model(tmp_path_factory.mktemp("model"), (*WORDS, *toys.WORDS)))


class World:
    """A log, a host, an engine, and pipelines between them."""

    def __init__(self, renderer, clock=None, **faults):
        self.clock = clock or FastClock()
        self.bus = MemoryBus(self.clock)
        self.policy = FaultyPolicy(renderer, **faults)
        self.host = RestartingHost(self.clock)
        self.outside = Outside(host=self.host, policy=self.policy, renderer=renderer)
        self.manifest = RunManifest(run="r", seed=5, samples=2)
        self.samples = 0

    async def publish(self, count):
        """Publish hunts on a small grid, two samples each."""
        source = GeneratedSource("keydoor", {"size": 4}, count=count)
        self.samples += await publish_source(self.bus, self.clock, source, self.manifest)

    async def publish_toys(self, *payloads):
        """Publish toys, two samples each."""
        publisher = Publisher(self.bus, self.clock, "producer")
        manifest = await ensure_manifest(self.bus, self.clock, publisher, self.manifest)
        for row, payload in enumerate(payloads):
            toy = Instance(visit=0, row=row, family="toy", payload={"length": 2, **payload})
            self.samples += await publish_tasks(publisher, tasks_of(manifest, "toys", toy, now_ms=self.clock.now_ms()))

    def pipeline(self, config=None, worker="pipeline"):
        """Return a pipeline in this world."""
        return Pipeline(self.bus, self.clock, config or Config(), self.outside, worker=worker)

    async def ended(self):
        """Wait for one accepted outcome of each sample, and return them."""
        return await outcomes(self.bus, self.clock, self.manifest, self.samples, limit_s=LIMIT_S)

    async def books(self):
        """Return samples by disposition; there must be no violation."""
        found = await ledger(self.bus, self.clock, "r")
        assert [] == found.violations
        return found.counts()


@asynccontextmanager
async def world_of(renderer, **faults):
    world = World(renderer, **faults)
    await world.bus.create_topics(TABLE)
    async with world.host:
        yield world


@asynccontextmanager
async def working(pipeline):
    """Run a pipeline while the block runs, and stop it in good order."""
    running = asyncio.create_task(pipeline.run())
    try:
        yield running
    finally:
        pipeline.stop()
        await asyncio.wait_for(running, 15)


def hunted(trajectories):
    """Return the hunts that were completed; each must have succeeded, with a sound transcript."""
    found = [one for one in trajectories if isinstance(one.outcome, Completed) and one.task.family == "keydoor"]
    for one in found:
        transcript.check(one.transcript)
        assert (1.0, 1.0, True) == (one.outcome.success, one.outcome.reward, one.verdict["opened"])
        assert one.verdict["turns"] == one.verdict["optimum"] == len(one.transcript.turns)
    return found


def failures(trajectories):
    """Return why samples failed; none of them may carry anything to train on."""
    found = [one for one in trajectories if not isinstance(one.outcome, Completed)]
    for one in found:
        assert isinstance(one.outcome, Failed)
        assert (None, None, None) == (one.transcript, one.verdict, one.stop)
    return Counter(one.outcome.kind for one in found)


async def rulings(bus):
    """Return how often each ruling fell over all terminal records of the run."""
    arbiter, found = Arbiter(), Counter()
    for record in await read_all(bus, TRAJECTORIES):
        task = (await unpack(TRAJECTORIES, record)).message.task
        found[arbiter.rule(task.group, task.sample, task.payload_digest, record.offset)] += 1
    return found


async def test_every_task_becomes_one_accepted_trajectory(renderer):
    """Tasks in, trajectories out: the expert opens every door, and every turn is in the record."""
    async with world_of(renderer) as world:
        await world.publish(12)
        async with working(world.pipeline()):
            found = await world.ended()

        assert 24 == len(hunted(found))
        assert {"unread": 24} == await world.books()
        assert Counter({Ruling.ACCEPTED: 24}) == await rulings(world.bus)
        assert (await world.host.counts()).environments == 0


async def test_siblings_meet_the_same_hunt(renderer):
    """One group, one layout: what differs is the policy's luck alone."""
    async with world_of(renderer) as world:
        await world.publish(3)
        async with working(world.pipeline()):
            found = await world.ended()
        openings = {
            (one.task.group, one.transcript.token_ids[: one.transcript.turns[0].sampled].tobytes()) for one in found
        }

        assert 3 == len(openings) == len({group for group, _ in openings})


async def test_a_bug_of_a_handler_fails_its_own_samples_and_no_other(renderer, tmp_path, monkeypatch):
    """In init, act, grade or the environment: a typed failure each, never a reward, never a dead stage."""
    toys.install(tmp_path, monkeypatch)
    async with world_of(renderer) as world:
        broken = [{"raise_in": where} for where in ("init", "grade", "reset", "step", "verdict")]
        await world.publish_toys(*broken, {"success": 7.0}, {})
        await world.publish(3)
        async with working(world.pipeline()):
            found = await world.ended()

        assert {FailureKind.HANDLER: 12} == failures(found)
        assert (6, 2) == (len(hunted(found)), sum(isinstance(one.outcome, Completed) for one in found) - 6)
        assert {"unread": 8, "failed": 12} == await world.books()


async def test_poison_on_the_way_stops_nobody(renderer):
    """Undecodable bytes go to `dead`; the tasks around them end."""
    async with world_of(renderer) as world:
        for partition in range(TASKS.partitions):
            await world.bus.publish(TASKS.name, b"\xc1", partition=partition)
        await world.publish(4)
        async with working(world.pipeline()):
            found = await world.ended()

        assert 8 == len(hunted(found))
        assert TASKS.partitions == sum((await world.bus.end_offsets(DEAD.name)).values())


async def test_an_engine_that_is_away_for_a_while_costs_no_attempt(renderer):
    """RUN waits for it."""
    async with world_of(renderer) as world:
        world.policy.away = range(10, 60)
        await world.publish(5)
        async with working(world.pipeline()):
            found = await world.ended()

        assert {0} == {one.task.attempt for one in hunted(found)}
        assert 10 == len(found)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_breaks_each_sample_gets_one_outcome(renderer, tmp_path, monkeypatch, seed):
    """Garbage and refusals of the engine, a host that loses its leases, bugs of a handler, a stop in the middle."""
    toys.install(tmp_path, monkeypatch)
    async with world_of(renderer, seed=seed, garbage=0.03, busy=0.05) as world:
        first, second = world.pipeline(HARD_STOP, "first"), world.pipeline(worker="second")
        world.policy.away = range(30 + 10 * seed, 50 + 10 * seed)
        world.policy.at = {25 + 5 * seed: world.host.restart, 90: first.stop}
        await world.publish_toys({"raise_in": "init"}, {"raise_in": "grade"}, {})
        await world.publish(10)
        await asyncio.wait_for(first.run(), 15)
        assert not world.policy.at
        async with working(second):
            found = await world.ended()
        failed, bugs = failures(found).total(), 4

        assert 26 == len({one.task.id for one in found}) == len(found)
        # The restart cost a sample one attempt at most: only two bad answers of the engine may have used up the rest.
        assert bugs <= failed <= bugs + world.policy.garbled // 2
        assert not any(
            isinstance(one.outcome, Completed) for one in found if one.task.payload.get("raise_in") is not None
        )
        assert hunted(found)
        assert {"failed": failed, "unread": 26 - failed} == await world.books()
        assert (await rulings(world.bus))[Ruling.ACCEPTED] == 26


async def test_a_stop_in_the_middle_loses_nothing(renderer):
    """What was in work is handed out again; what had ended is not repeated."""
    async with world_of(renderer) as world:
        first = world.pipeline(HARD_STOP)
        world.policy.at = {40: first.stop}
        await world.publish(8)
        await asyncio.wait_for(first.run(), 15)
        before = sum((await world.bus.end_offsets(TRAJECTORIES.name)).values())
        async with working(world.pipeline()):
            found = await world.ended()

        assert before < 16 == len(hunted(found))
        assert {"unread": 16} == await world.books()


async def test_a_stop_with_time_to_finish_repeats_nothing(renderer):
    """An ordered stop waits for the turns in flight, and commits them."""
    async with world_of(renderer) as world:
        first = world.pipeline()
        world.policy.at = {20: first.stop}
        await world.publish(6)
        await asyncio.wait_for(first.run(), 15)
        async with working(world.pipeline()):
            await world.ended()

        names = [call.request_id for call in world.policy.calls]
        assert len(names) == len(set(names))


async def test_pipelines_share_the_work_and_one_may_leave(renderer):
    """Groups rebalance while work is in flight: every sample still has one outcome."""
    async with world_of(renderer) as world:
        leaving = world.pipeline(HARD_STOP, "leaving")
        world.policy.at = {60: leaving.stop}
        await world.publish(12)
        async with working(world.pipeline(worker="staying")):
            await asyncio.wait_for(leaving.run(), 15)
            found = await world.ended()

        assert 24 == len(hunted(found))
        assert {"unread": 24} == await world.books()
