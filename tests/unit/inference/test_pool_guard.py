"""A policy behind its breaker: an engine that is away costs a rollout nothing but time that does not count."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from infra.breaker import BreakerLimits
from infra.clock import VirtualClock, settle
from infra.errors import Failure
from infra.guard import there
from infra.inference.base import Need, PolicyError, PolicyOverloaded, PolicyUnreachable, Weights
from infra.inference.pool import POLICY
from infra.inference.pooled import answers
from infra.inference.scripted import ScriptedPolicy
from infra.side_by_side import alongside
from infra.waiting import heard_by
from schemas.outcome import FailureKind
from tests.pools import address_of, backends_of, guards_on, pool_of, request, shares

WAIT_S = 30.0
LONGEST_S = 600.0


class Engine(ScriptedPolicy):
    """The scripted twin, which may be away, or there and of no use."""

    def __init__(self, **changes):
        super().__init__(lambda prompt, seed: [5, 6], **changes)
        self.error = None

    async def info(self):
        if self.error is not None:
            raise self.error
        return await super().info()

    async def generate(self, *arguments, **settings):
        answer = await super().generate(*arguments, **settings)
        if self.error is not None:
            raise self.error
        return answer


class World:
    """An engine, its guard, and a policy that waits."""

    def __init__(self):
        self.clock, self.engine = VirtualClock(), Engine()
        limits = BreakerLimits(longest_s=LONGEST_S)
        guards = guards_on(self.clock, limits)
        self.pool = pool_of(self.clock, self.engine, guards=guards, wait_s=WAIT_S)
        self.guard = guards.guard(POLICY, address_of("engine"), there)

    def generate(self):
        return asyncio.create_task(self.pool.generate(np.array([1], np.int32), request(), Need()))

    async def probe_for(self, seconds):
        """Let time pass, with a probe in each second."""
        for _ in range(round(seconds)):
            looking = asyncio.create_task(self.guard.look())
            await self.clock.advance(1)
            looking.cancel()
        await settle()


@pytest.fixture
def world():
    return World()


async def test_an_outage_longer_than_the_patience_costs_no_attempt(world):
    """The limit on waiting does not count what the breaker was open."""
    world.engine.error = PolicyUnreachable("connection refused")
    waiting = [world.generate() for _ in range(5)]
    await world.probe_for(10 * WAIT_S)
    calls, done = len(world.engine.calls), [one.done() for one in waiting]
    world.engine.error = None
    await world.probe_for(10)
    answered = await asyncio.wait_for(asyncio.gather(*waiting), 30)

    assert (False, 5) == (any(done), len(answered))
    # Those that opened it, then none but probes, then one for each.
    assert calls < 5 * 8
    assert len(world.engine.calls) == calls + 5


async def test_what_the_engine_serves_is_asked_again_after_an_outage(world):
    """Another one may have taken its place."""
    await world.pool.info(Need())
    world.engine.error = PolicyUnreachable("connection refused")
    waiting = world.generate()
    await world.probe_for(10)
    world.engine.error, world.engine._weights = None, Weights(3)
    await world.probe_for(10)
    await asyncio.wait_for(waiting, 30)

    assert (await world.pool.info(Need())).version == 3


async def test_an_episode_that_comes_while_the_engine_is_away_says_what_it_waits_for(world):
    """It has asked nobody itself; once it is answered it waits for nothing."""
    world.engine.error = PolicyUnreachable("connection refused")
    first = world.generate()
    await world.probe_for(10)
    said = []
    with heard_by(said.append):
        second = world.generate()
    await world.probe_for(10)
    world.engine.error = None
    await world.probe_for(10)
    await asyncio.wait_for(asyncio.gather(first, second), 30)

    assert ["the engine, which is away", ""] == said


async def test_an_engine_that_is_overloaded_is_not_away(world):
    """It says so itself: it is asked again for as long as the limit allows, then the rollout fails."""
    world.engine.error = PolicyOverloaded("429")
    waiting = world.generate()
    await world.probe_for(WAIT_S + 5)

    assert not world.guard.open
    assert isinstance(waiting.exception(), Failure)
    assert FailureKind.RATE_LIMIT is waiting.exception().kind


async def test_an_outage_that_outlasts_its_limit_is_left_to_the_stages_budget(world):
    """No attempt is spent on it: the call waits on, and its time counts again."""
    world.engine.error = PolicyUnreachable("connection refused")
    waiting = world.generate()
    patience = world.guard.counted_s
    await world.probe_for(LONGEST_S + 100)

    assert not waiting.done()
    assert world.guard.counted_s > patience + 90
    waiting.cancel()


@pytest.mark.parametrize(
    ("error", "there"),
    [
        (None, True),
        (PolicyUnreachable("refused"), False),
        (PolicyOverloaded("503"), True),
        (PolicyError("500"), True),
    ],
    ids=repr,
)
async def test_whoever_answers_anything_is_there(world, error, there):
    """What it answers is the business of its callers."""
    world.engine.error = error

    assert there is await answers(world.engine)


class Pair:
    """Two engines with breakers, and a worker's guards at work."""

    def __init__(self):
        self.clock = VirtualClock()
        self.engines = {name: Engine() for name in "ab"}
        self.guards = guards_on(self.clock, BreakerLimits(longest_s=LONGEST_S))
        self.pool = pool_of(self.clock, guards=self.guards, wait_s=WAIT_S, **self.engines)

    def breaks(self, *names):
        for name in names:
            self.engines[name].error = PolicyUnreachable("refused")

    async def lets(self, seconds):
        for _ in range(round(seconds * 2)):
            await self.clock.advance(0.5)
        await settle()

    def generate(self, episode="r/g/0/0"):
        return asyncio.create_task(self.pool.generate(np.array([1], np.int32), request(episode), Need()))

    async def seen(self, seconds, episode="r/g/0/0"):
        """Ask until the engines' breakers had their chance."""
        running = self.generate(episode)
        await self.lets(seconds)
        return running


@pytest.fixture
async def pair():
    found = Pair()
    async with alongside(found.guards.run()):
        yield found


async def test_while_one_of_two_engines_is_away_the_other_one_does_the_work(pair):
    """No work is held back, and no budget stands still."""
    pair.breaks("a")
    answers = [await asyncio.wait_for(await pair.seen(2, f"r/g{n}/0/0"), 5) for n in range(8)]

    assert shares(answers) == {"b": 8}
    assert (pair.guards.ready(), pair.guards.still_s()) == (True, 0)


async def test_where_the_only_engine_that_works_is_away_nothing_new_is_begun(pair):
    """One that is drained is there, and takes nothing: the outage costs no attempt."""
    pair.pool.have([*backends_of("a", draining=True), *backends_of("b")])
    pair.breaks("b")
    waiting = await pair.seen(3 * WAIT_S)
    ready, still_s = pair.guards.ready(), pair.guards.still_s()
    pair.engines["b"].error = None
    await pair.lets(10)

    assert (ready, still_s > 2 * WAIT_S) == (False, True)
    assert (await asyncio.wait_for(waiting, 5)).address == "http://b"
    assert pair.guards.ready()


async def test_an_engine_that_is_removed_while_it_is_away_is_waited_for_no_longer(pair):
    """Its outage ends with it, and its time is counted once."""
    pair.breaks("a", "b")
    waiting = await pair.seen(100)
    before = pair.guards.still_s()
    pair.pool.have(backends_of("b"))
    just_after = pair.guards.still_s()
    await pair.lets(50)
    later = pair.guards.still_s()
    pair.engines["b"].error = None
    await pair.lets(10)

    assert just_after == pytest.approx(before)
    assert later == pytest.approx(before + 50, abs=2)
    assert (await asyncio.wait_for(waiting, 5)).address == "http://b"


async def test_an_outage_of_all_begins_when_the_last_engine_that_is_well_is_removed(pair):
    """That another one was away before cost nobody anything."""
    pair.breaks("b")
    for n in range(5):
        await asyncio.wait_for(await pair.seen(20, f"r/g{n}/0/0"), 5)
    pair.pool.have(backends_of("b"))

    assert pair.guards.still_s() < 1


async def test_an_engine_that_comes_back_is_given_work_slowly(pair):
    """Its cache is cold, and all that waited would come at once."""
    await asyncio.wait_for(await pair.seen(1), 5)
    await pair.lets(60)
    pair.breaks("a")
    for n in range(4):
        await asyncio.wait_for(await pair.seen(2, f"r/x{n}/0/0"), 5)
    pair.engines["a"].error = None
    await pair.lets(10)
    answers = [await asyncio.wait_for(await pair.seen(0.5, f"r/y{n}/0/0"), 5) for n in range(4)]

    assert shares(answers) == {"b": 4}


async def test_an_engine_that_is_removed_and_added_at_once_is_looked_after(pair):
    """As a worker meets it that reads both records at its start."""
    pair.pool.have(backends_of("b"))
    pair.pool.have(backends_of("a"))
    pair.breaks("a")
    waiting = await pair.seen(10)
    ready = pair.guards.ready()
    pair.engines["a"].error = None
    await pair.lets(10)

    assert not ready
    assert (await asyncio.wait_for(waiting, 5)).address == "http://a"


async def test_an_engine_that_is_full_again_and_again_is_not_away(pair):
    """It answers between the connections that broke."""
    pair.pool.have(backends_of("a"))
    for error in [PolicyOverloaded("503"), PolicyUnreachable("reset")] * 6:
        pair.engines["a"].error = error
        (await pair.seen(1)).cancel()

    assert pair.guards.ready()


async def test_the_wait_for_a_runs_only_engine_has_a_limit_while_others_are_there(pair):
    """The worker goes on, and its place is for what they serve."""
    pair.engines["b"]._weights = Weights(0, "theirs")
    pair.engines["a"]._weights = Weights(0, "mine")
    await asyncio.wait_for(pair.pool.info(Need(0, "mine")), 5)
    await asyncio.wait_for(pair.pool.info(Need(0, "theirs")), 5)
    pair.breaks("a")
    waiting = asyncio.create_task(pair.pool.generate(np.array([1], np.int32), request(), Need(0, "mine")))
    await pair.lets(2 * WAIT_S)

    assert isinstance(waiting.exception(), Failure)


async def test_what_an_outage_adds_has_one_limit_however_often_the_pool_changes(pair):
    """Drained, added and removed, away all the time."""
    pair.breaks("a", "b")
    waiting = await pair.seen(100)
    for _ in range(4):
        await pair.lets(LONGEST_S / 2)
        pair.pool.have([*backends_of("a", draining=True), *backends_of("b")])
        await pair.lets(LONGEST_S / 2)
        pair.pool.have(backends_of("a", "b"))
    waiting.cancel()

    assert pair.guards.still_s() == pytest.approx(LONGEST_S, abs=1)
