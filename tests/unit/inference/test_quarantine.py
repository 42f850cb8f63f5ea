"""An engine is asked whether it has what it loaded; a version that it has not is put into quarantine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.clock import VirtualClock, settle
from infra.control import ControlView
from infra.errors import Failure
from infra.inference.backends import registered
from infra.inference.base import UNKNOWN, BadReply, ContextOverflow, Need, PolicyRefused, PolicyUnreachable, Weights
from infra.inference.canary import CANARY_IDS, LIMIT_NATS, apart, canary_of, canary_prompt
from infra.inference.pool import PolicyPool, Request
from infra.inference.scripted import ScriptedPolicy, scripted_scores
from infra.inference.sync import AGAIN_S, ASKS, LOOK_EVERY_S, WeightSync
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from schemas.control import PolicyVersion, Quarantine
from schemas.topics import CONTROL, METRICS, TABLE
from schemas.transcript import Sampling
from tests.logs import read_all
from tests.pools import guards_on

PROMPT = canary_prompt(1000, 512)

REQUEST = Request(sampling=Sampling(), seed=1, request_id="a", stop_token_ids=(), max_tokens=9, episode="e", group="g")


def canary(version, run="r"):
    """Return the canary of a version of the twin's weights."""
    return canary_of(PROMPT, scripted_scores(Weights(version, run), PROMPT))


@given(vocabulary=st.integers(2, 300_000), context=st.none() | st.integers(3, 4096))
def test_a_model_has_one_prompt(vocabulary, context):
    """Of ids that it knows, as many as it takes, and the same ones every time."""
    prompt = canary_prompt(vocabulary, context)
    assert len(prompt) == (CANARY_IDS if context is None else min(CANARY_IDS, context - 1))
    assert prompt.min() >= 0
    assert prompt.max() < vocabulary
    assert prompt.tolist() == canary_prompt(vocabulary, context).tolist()


@pytest.mark.parametrize(
    ("found", "distance"),
    [
        (lambda expected: expected, 0.0),
        (lambda expected: expected + 0.25, 0.25),
        (lambda expected: expected[:-1], np.inf),
        (lambda expected: expected * np.nan, np.inf),
    ],
)
def test_the_distance_is_the_mean_over_the_prompt(found, distance):
    """What cannot be compared is infinitely far."""
    assert apart(canary(1), found(canary(1).expected)) == pytest.approx(distance, abs=1e-6)


class World:
    """A log, an engine, and who brings weights into it."""

    def __init__(self, folder):
        self.clock = VirtualClock()
        self.bus = MemoryBus(self.clock)
        self.engine = ScriptedPolicy(lambda _prompt, _seed: [5, 6], clock=self.clock, token_s=1.0)
        self.folder = folder

    async def announce(self, version, *, epoch=0, says=None):
        """Announce a version; its canary is that of the weights that it `says` it has."""
        directory = self.folder / f"v{version}"
        directory.mkdir(exist_ok=True)
        await Publisher(self.bus, self.clock, "trainer").publish(
            CONTROL,
            PolicyVersion(
                run="r",
                epoch=epoch,
                version=version,
                directory=str(directory),
                digest="d",
                canary=canary(version if says is None else says),
            ),
        )
        await settle()

    @asynccontextmanager
    async def syncing(self):
        control = ControlView(self.bus, self.clock)
        async with control.following():
            publisher = Publisher(self.bus, self.clock, "policy")
            sync = WeightSync(control, self.engine, self.clock, publisher, run="r", address="http://engine")
            running = asyncio.create_task(sync.run())
            await settle()
            yield
            assert not running.done(), running
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    @property
    def loaded(self):
        return [version for _, version in self.engine.loaded]

    async def serves(self):
        return (await self.engine.info()).weights

    async def quarantines(self):
        found = [(await unpack(CONTROL, record)).message for record in await read_all(self.bus, CONTROL)]
        return [one for one in found if isinstance(one, Quarantine)]


@pytest.fixture
async def world(tmp_path):
    made = World(tmp_path)
    await made.bus.create_topics(TABLE)
    return made


async def test_weights_that_are_there_are_served_and_their_distance_is_a_metric(world):
    """Beside the time that the hand-over took."""
    async with world.syncing():
        await world.announce(1)
        assert await world.serves() == Weights(1, "r")
        (record,) = await read_all(world.bus, METRICS)
        points = (await unpack(METRICS, record)).message.points
    assert {"policy.handover_s": 0.0, "policy.canary_nats": 0.0} == {point.name: point.value for point in points}


async def test_an_engine_that_has_other_weights_is_given_back_what_it_had(world):
    """Tried once more, and then the version is in quarantine: it is loaded no further time."""
    async with world.syncing():
        await world.announce(1)
        await world.announce(2, says=9)
        assert ([1, 2, 1], Weights(1, "r")) == (world.loaded, await world.serves())
        assert await world.quarantines() == []
        await world.clock.advance(AGAIN_S)
        assert [1, 2, 1, 2, 1] == world.loaded
        (found,) = await world.quarantines()
        await world.clock.advance(10 * LOOK_EVERY_S)
        assert [1, 2, 1, 2, 1] == world.loaded
        assert await world.serves() == Weights(1, "r")

    assert (found.version, found.address) == (2, "http://engine")
    assert f"nats from the trainer's in the mean, and up to {LIMIT_NATS} is rounding" in found.cause


async def test_an_engine_with_nothing_to_go_back_to_has_no_version(world):
    """Nobody's task is sampled by what it has."""
    async with world.syncing():
        await world.announce(1, says=9)
        assert await world.serves() == UNKNOWN


async def test_a_load_that_went_wrong_once_is_forgiven(world):
    """The second time it is there, and nothing is in quarantine."""
    said = []

    def scores(weights, ids):
        said.append(weights)
        return scripted_scores(Weights(7, "r") if len(said) == 1 else weights, ids)

    world.engine.scores = scores
    async with world.syncing():
        await world.announce(1)
        await world.clock.advance(AGAIN_S)
        assert await world.serves() == Weights(1, "r")
        assert await world.quarantines() == []


@pytest.mark.parametrize("error", [BadReply("a log-prob is no number"), PolicyRefused("no such ids")])
async def test_an_engine_that_has_no_answer_to_the_canary_has_other_weights(world, error):
    """Not a number goes round in no JSON, and a model of fewer ids knows not all of the prompt."""

    def scores(weights, ids):
        if weights.version == 2:
            raise error
        return scripted_scores(weights, ids)

    world.engine.scores = scores
    async with world.syncing():
        await world.announce(1)
        await world.announce(2)
        await world.clock.advance(AGAIN_S)
        assert await world.serves() == Weights(1, "r")
    (found,) = await world.quarantines()
    assert "no answer to the canary of version 2" in found.cause


async def test_weights_that_could_not_be_asked_for_are_put_back_and_tried_again(world):
    """Whatever kept the engine from answering says nothing of them; until they are proven nobody is served by them."""
    away = [PolicyUnreachable("the connection broke")] * (ASKS + 1)

    def scores(weights, ids):
        if weights.version == 2 and away:
            raise away.pop()
        return scripted_scores(weights, ids)

    world.engine.scores = scores
    async with world.syncing():
        await world.announce(1)
        await world.announce(2)
        await world.clock.advance((ASKS - 1) * AGAIN_S)
        assert await world.serves() == Weights(1, "r")
        await world.clock.advance(3 * AGAIN_S)
        assert await world.serves() == Weights(2, "r")
        assert await world.quarantines() == []


async def test_a_doubt_is_forgotten_once_a_version_is_there(world):
    """The second time is the second time in a row, not in the life of a run."""
    wrong = [True]

    def scores(weights, ids):
        return scripted_scores(Weights(9, "r") if weights.version == 1 and wrong and wrong.pop() else weights, ids)

    world.engine.scores = scores
    async with world.syncing():
        await world.announce(1)
        await world.clock.advance(AGAIN_S)
        assert await world.serves() == Weights(1, "r")
        wrong.append(True)
        await world.engine.label(Weights())  # it was started again
        await world.clock.advance(LOOK_EVERY_S + 2 * AGAIN_S)
        assert await world.serves() == Weights(1, "r")
        assert await world.quarantines() == []


async def test_an_engine_that_is_started_again_in_a_quarantine_gets_the_version_before(world):
    """As it would have without being started again."""
    async with world.syncing():
        await world.announce(1)
        await world.announce(2, says=9)
        await world.clock.advance(AGAIN_S)
        assert len(await world.quarantines()) == 1
        await world.engine.label(Weights())
        await world.clock.advance(LOOK_EVERY_S + AGAIN_S)
        assert await world.serves() == Weights(1, "r")


async def test_an_engine_whose_context_is_too_short_for_the_canary_is_not_suspected(world):
    """How long its context is, is a setting of its own."""

    def scores(weights, ids):
        raise ContextOverflow("32 tokens leave no room")

    world.engine.scores = scores
    async with world.syncing():
        await world.announce(1)
        assert await world.serves() == Weights(1, "r")


async def test_what_cannot_be_put_back_leaves_an_engine_with_no_version(world):
    """Its trainer keeps the last versions alone, and this one's directory may be gone."""
    async with world.syncing():
        await world.announce(1)
        (world.folder / "v1").rmdir()
        await world.announce(2, says=9)
        assert await world.serves() == UNKNOWN
        assert world.engine._mode is None


@pytest.mark.parametrize("then", [{"version": 3}, {"version": 2, "epoch": 5}])
async def test_what_is_announced_after_a_quarantine_is_loaded(world, then):
    """Another version, or the same one by a trainer that was started again."""
    async with world.syncing():
        await world.announce(1)
        await world.announce(2, says=9)
        await world.clock.advance(AGAIN_S)
        await world.announce(**then)
        await world.clock.advance(AGAIN_S)
        assert await world.serves() == Weights(then["version"], "r")


async def test_an_engine_that_answers_in_no_pause_is_asked_behind_it(world):
    """As vLLM is; it is given back what it had all the same."""
    info, paused = world.engine.info, []

    async def of_vllm():
        return replace(await info(), scores_paused=False)

    def scores(weights, ids):
        paused.append(world.engine._mode is not None)
        return scripted_scores(weights, ids)

    world.engine.info, world.engine.scores = of_vllm, scores
    async with world.syncing():
        await world.announce(1)
        await world.announce(2, says=9)
        assert ([False, False], Weights(1, "r")) == (paused, await world.serves())
        assert world.engine._mode is None


async def test_a_pool_takes_no_token_of_a_version_in_quarantine(world):
    """Neither from an engine that still has it, nor in an answer that it had a part in."""
    await world.bus.start()
    pool = PolicyPool(lambda _: world.engine, world.clock, guards_on(world.clock), wait_s=1.0)
    need = Need(0, None)
    await world.engine.label(Weights(2, "r"))
    await world.announce(2)
    bad = Quarantine(run="r", epoch=0, version=2, address="a", cause="0.9 nats from the trainer's", at_ms=1)
    async with registered(pool, world.bus, world.clock, url="http://engine"):
        assert (await pool.info(need)).weights == Weights(2, "r")
        asking = asyncio.create_task(pool.generate(np.array([1], np.int32), REQUEST, need))
        await settle()
        await Publisher(world.bus, world.clock, "policy").publish(CONTROL, bad)
        await world.clock.advance(3.0)
        with pytest.raises(Failure, match=r"version 2 of run r sampled a part of it, which is in quarantine: 0.9 nats"):
            await asking
        asking = asyncio.create_task(pool.info(need))
        await world.clock.advance(2.0)
        with pytest.raises(Failure, match=r"waited 1 s for policy version >= 0"):
            await asking
        await world.announce(3)
        await world.engine.label(Weights(3, "r"))
        asking = asyncio.create_task(pool.info(need))
        await world.clock.advance(3.0)
        assert (await asking).weights == Weights(3, "r")


def test_a_canary_without_a_logprob_for_each_id_is_none():
    """It would be compared with nothing."""
    with pytest.raises(ValueError, match="a canary has 128 bytes of ids and 120 of log-probs"):
        msgspec.structs.replace(canary(1), logprobs=canary(1).logprobs[:-4]).check()
