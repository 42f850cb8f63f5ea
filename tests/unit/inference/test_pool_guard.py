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
from infra.waiting import heard_by
from schemas.outcome import FailureKind
from tests.pools import address_of, guards_on, pool_of, request

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
