"""The engines of a stage: which one is asked, and for how long one is waited for."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from infra.clock import VirtualClock, settle
from infra.errors import Failure
from infra.inference.base import (
    BadReply,
    Need,
    PolicyError,
    PolicyOverloaded,
    PolicyRefused,
    PolicyUnreachable,
    Weights,
)
from infra.inference.pool import ASK_BESIDE_S, OTHERS_S
from infra.inference.scripted import ScriptedPolicy
from infra.waiting import heard_by
from schemas.control import Backend
from schemas.outcome import Boundary, FailureKind
from tests.pools import backends_of, pool_of, request, shares

ANY = Need()
PROMPT = np.array([1, 2], np.int32)


class Engine(ScriptedPolicy):
    """The scripted twin, whose `info` may fail too."""

    def __init__(self, **changes):
        super().__init__(lambda prompt, seed: [5, 6], **changes)
        self.asked = 0
        self.away = False
        self.silent_s = 0.0
        self.closed = False
        self._dead = asyncio.Event()

    async def info(self):
        self.asked += 1
        await self._clock.sleep(self.silent_s)
        if self.away:
            raise PolicyUnreachable("connection refused")
        return await super().info()

    async def generate(self, *arguments, **settings):
        if self.away:
            raise PolicyUnreachable("connection refused")
        sampling, dying = (
            asyncio.ensure_future(work) for work in (super().generate(*arguments, **settings), self._dead.wait())
        )
        try:
            await asyncio.wait({sampling, dying}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                raise PolicyUnreachable("the connection broke")
            return await sampling
        finally:
            sampling.cancel(), dying.cancel()

    def die(self):
        """Break all connections, and take none any more."""
        self.away = True
        self._dead.set()

    async def close(self):
        self.closed = True

    def serve(self, version, run="", **changes):
        """Become another engine."""
        self._weights = Weights(version, run)
        self._digest = changes.get("digest", self._digest)


@pytest.fixture
def clock():
    return VirtualClock()


async def generate(pool, need=ANY, **changes):
    return await pool.generate(PROMPT, request(**changes), need)


async def after(clock, seconds, work):
    """Start work, move time, and return what came of it."""
    running = asyncio.create_task(work)
    await settle()
    await clock.advance(seconds)
    return await asyncio.wait_for(running, 5)


def is_engine_failure(failure):
    return (FailureKind.ENGINE, Boundary.POLICY) == (failure.kind, failure.boundary)


async def test_an_answer_comes_through_as_it_is(clock):
    """Nothing is added to an engine that is well."""
    engine = Engine()
    answer = await generate(pool_of(clock, engine))

    assert [5, 6] == answer.generation.token_ids.tolist()
    assert (1, "r/g/0/0/0", (6,), 9) == (
        engine.calls[0].seed,
        engine.calls[0].request_id,
        engine.calls[0].stop_token_ids,
        engine.calls[0].max_tokens,
    )


async def test_an_engine_that_is_busy_or_away_is_asked_again(clock):
    """With pauses that grow to a bound; the sample keeps its attempt."""
    engine = Engine()
    engine.fail_next(*[PolicyOverloaded("429"), PolicyUnreachable("gone")] * 4)
    answer = await after(clock, 60, generate(pool_of(clock, engine)))

    assert (9, [5, 6]) == (len(engine.calls), answer.generation.token_ids.tolist())


async def test_waiting_for_an_answer_has_a_limit(clock):
    """The failure says how long, for what, and what the engine said last."""
    engine = Engine()
    engine.away = True
    with pytest.raises(
        Failure, match="waited 30 s for generation r/g/0/0/0; http://engine: connection refused"
    ) as caught:
        await after(clock, 40, generate(pool_of(clock, engine, wait_s=30)))

    assert is_engine_failure(caught.value)


async def test_an_engine_that_stays_busy_is_a_rate_limit(clock):
    """It is there: another attempt comes later than after a failure of it."""
    engine = Engine()
    engine.fail_next(*[PolicyOverloaded("429")] * 99)
    with pytest.raises(Failure, match="waited 30 s for generation r/g/0/0/0; http://engine: 429") as caught:
        await after(clock, 40, generate(pool_of(clock, engine, wait_s=30)))

    assert (FailureKind.RATE_LIMIT, Boundary.POLICY) == (caught.value.kind, caught.value.boundary)


@pytest.mark.parametrize("error", [BadReply("spans with gaps"), PolicyRefused("no such model")])
async def test_an_answer_that_asking_again_would_not_mend_is_a_failure_at_once(clock, error):
    """Nothing is waited for."""
    engine = Engine()
    engine.fail_next(error)
    with pytest.raises(Failure, match=f"generation r/g/0/0/0: {type(error).__name__}: {error}") as caught:
        await generate(pool_of(clock, engine))

    assert is_engine_failure(caught.value)
    assert clock.monotonic() == 0


async def test_what_the_engine_serves_is_asked_once(clock):
    """However many episodes begin."""
    engine = Engine(version=3)
    pool = pool_of(clock, engine)
    found = await asyncio.gather(*(pool.info(Need(2)) for _ in range(10)))

    assert ({3}, 1) == ({info.version for info in found}, engine.asked)


async def test_a_version_is_waited_for(clock):
    """It comes with the next hand-over; all that wait share the question."""
    engine = Engine(version=3)
    pool = pool_of(clock, engine)
    waiting = [asyncio.create_task(pool.info(Need(4))) for _ in range(20)]
    await settle()
    await clock.advance(2)
    asked = engine.asked
    engine.serve(4)
    await clock.advance(2)

    assert {4} == {info.version for info in await asyncio.gather(*waiting)}
    assert asked < 30


async def test_a_version_that_does_not_come_is_an_engine_failure(clock):
    """It names what was waited for and what is there."""
    says = "waited 30 s for policy version >= 4; http://engine: it has version 3 of no run"
    with pytest.raises(Failure, match=says) as caught:
        await after(clock, 31, pool_of(clock, Engine(version=3), wait_s=30).info(Need(4)))

    assert is_engine_failure(caught.value)


async def test_an_engine_that_serves_another_run_is_soon_left_to_the_retries(clock):
    """It may do so for hours, and the places are for what it does serve."""
    engine = Engine()
    engine.serve(3, "theirs")
    says = "waited 10 s for policy version >= 0 of run mine; http://engine: it has version 3 of run theirs"
    with pytest.raises(Failure, match=says) as caught:
        await after(clock, OTHERS_S + 3, pool_of(clock, engine).info(Need(0, "mine")))

    assert FailureKind.RATE_LIMIT is caught.value.kind


async def test_an_engine_that_comes_to_serve_the_run_is_waited_for(clock):
    """As when a trainer goes on whose engine another one had; weights that are nobody's are those of a restart."""
    engine = Engine()
    engine.serve(3, "theirs")
    waiting = asyncio.create_task(pool_of(clock, engine).info(Need(1, "mine")))
    await settle()
    await clock.advance(OTHERS_S - 3)
    engine.serve(0)
    await clock.advance(OTHERS_S)
    engine.serve(1, "mine")
    await clock.advance(3)

    assert Weights(1, "mine") == (await asyncio.wait_for(waiting, 5)).weights


async def test_all_that_wait_for_an_engine_that_is_away_give_up_in_time(clock):
    """One after another they would wait for hours: each question may take seconds to fail."""
    engine = Engine(clock=clock)
    engine.away, engine.silent_s = True, 5.0
    pool = pool_of(clock, engine, wait_s=30)
    waiting = [asyncio.create_task(pool.info(Need())) for _ in range(50)]
    await settle(200)
    for _ in range(40):
        await clock.advance(1)
    await settle(200)
    failures = [task.exception() for task in waiting if task.done()]

    assert len(failures) == 50
    assert all(is_engine_failure(failure) for failure in failures)


async def test_after_an_engine_was_away_it_is_asked_again_what_it_serves(clock):
    """Another one may have taken its place, with another tokenizer."""
    engine = Engine(version=3)
    pool = pool_of(clock, engine)
    await pool.info(Need())
    engine.fail_next(PolicyUnreachable("gone"))
    engine.serve(0, digest="another")
    await after(clock, 5, generate(pool))

    assert ("another", 0) == ((await pool.info(Need())).tokenizer_digest, (await pool.info(Need())).version)


# ---- several engines


def turns(episode, count):
    """Return the prompts of an episode's turns: each extends the one before it."""
    return [(np.arange(1, 3 + turn, dtype=np.int32), request(episode, turn)) for turn in range(count)]


async def test_an_episode_stays_with_its_engine_and_siblings_find_the_one_that_knows_their_opening(clock):
    """Its next turns find their prefix there."""
    pool = pool_of(clock, a=Engine(), b=Engine())
    for sample in range(3):
        for prompt, turn in turns(f"r/g/{sample}/0", 4):
            answer = await pool.generate(prompt, turn, ANY)
            assert answer.address == "http://a"


async def test_generations_that_run_together_are_spread(clock):
    """By what each engine has to do; one with twice the weight gets about twice as much."""
    engines = {name: Engine(token_s=1.0, clock=clock) for name in "ab"}
    pool = pool_of(clock, **engines)
    pool.have([*backends_of("a", weight=2.0), *backends_of("b")])
    running = [asyncio.create_task(generate(pool, episode=f"r/g{n}/0/0")) for n in range(30)]
    await settle(100)
    await clock.advance(60)

    assert shares(await asyncio.gather(*running)) == {"a": 20, "b": 10}


async def test_an_episode_goes_on_at_another_engine_with_the_same_record(clock):
    """Its engine dies between two turns: the prompt holds every token, and the answer is complete or none."""
    a, b = Engine(), Engine()
    pool = pool_of(clock, a=a, b=b)
    (first, second) = turns("r/g/0/0", 2)
    before = await pool.generate(*first, ANY)
    a.away = True
    after_it = await pool.generate(*second, ANY)

    assert ("http://a", "http://b") == (before.address, after_it.address)
    assert [call.prompt.tolist() for call in b.calls] == [second[0].tolist()]
    assert clock.monotonic() == 0


async def test_no_generation_fails_because_an_engine_dies_while_they_run(clock):
    """32 episodes on two engines; what the dead one had sampled is sampled again, whole."""
    a, b = (Engine(token_s=1.0, clock=clock) for _ in range(2))
    pool = pool_of(clock, a=a, b=b)
    running = [asyncio.create_task(generate(pool, episode=f"r/g{n}/0/0")) for n in range(32)]
    await settle(100)
    await clock.advance(0.5)
    a.die()
    await settle(100)
    await clock.advance(30)
    answers = await asyncio.wait_for(asyncio.gather(*running), 30)

    assert shares(answers) == {"b": 32}
    assert {(5, 6)} == {tuple(answer.generation.token_ids.tolist()) for answer in answers}


async def test_an_engine_that_is_full_is_passed_over_and_asked_again_later(clock):
    """As long as another one takes work nobody waits."""
    a, b = Engine(), Engine()
    pool = pool_of(clock, a=a, b=b)
    a.fail_next(PolicyOverloaded("429"))
    first = await generate(pool)
    await clock.advance(5)
    second = await generate(pool, episode="r/g2/0/0")

    assert ("http://b", "http://a") == (first.address, second.address)


async def test_a_task_is_sampled_by_an_engine_whose_weights_suit(clock):
    """While weights are handed over one after another, and where runs have engines of their own."""
    old, new, other = Engine(), Engine(), Engine()
    old.serve(3, "mine"), new.serve(4, "mine"), other.serve(9, "theirs")
    pool = pool_of(clock, old=old, new=new, other=other)
    found = [
        (await generate(pool, need, episode=f"r/g{n}/0/0")).address
        for n, need in enumerate([Need(4, "mine"), Need(0, "theirs"), Need(4, "mine")])
    ]

    assert found == ["http://new", "http://other", "http://new"]


async def test_an_engine_that_has_caught_up_is_given_work_again(clock):
    """It is asked now and then, while another one does the work."""
    a, b = Engine(version=3), Engine(version=4)
    pool = pool_of(clock, a=a, b=b)
    first = await generate(pool, Need(4))
    a.serve(4)
    await clock.advance(ASK_BESIDE_S + 1)
    await generate(pool, Need(4), episode="r/g2/0/0")
    await settle()
    pool.have(backends_of("a"))

    assert (first.address, (await generate(pool, Need(4))).address) == ("http://b", "http://a")


async def test_an_engine_with_another_tokenizer_gets_nothing(clock):
    """Its ids mean something else; if it is the only one the rollout fails at once, and says why."""
    pool = pool_of(clock, a=Engine(tokenizer_digest="other"), b=Engine(tokenizer_digest="ours"), digest="ours")
    answers = [await generate(pool, episode=f"r/g{n}/0/0") for n in range(4)]
    alone = pool_of(clock, Engine(tokenizer_digest="other"), digest="ours")
    with pytest.raises(Failure, match="http://engine: the engine's tokenizer other is not this stage's ours") as caught:
        await generate(alone)

    assert shares(answers) == {"b": 4}
    assert is_engine_failure(caught.value)


async def test_engines_come_are_drained_and_go_while_generations_run(clock):
    """What runs at one that leaves ends there, and its connections are given up after that."""
    a, b = (Engine(token_s=1.0, clock=clock) for _ in range(2))
    pool = pool_of(clock, a=a, b=b)
    pool.have(backends_of("a"))
    first = asyncio.create_task(generate(pool))
    await settle()
    pool.have([*backends_of("a", draining=True), *backends_of("b")])
    second = asyncio.create_task(generate(pool))
    await settle()
    pool.have(backends_of("b"))
    await settle()
    closed = a.closed
    await clock.advance(10)
    answers = await asyncio.gather(first, second)
    await settle()

    assert [answer.address for answer in answers] == ["http://a", "http://b"]
    assert (closed, a.closed) == (False, True)


async def test_a_pool_whose_engines_are_all_drained_waits_for_one_that_is_not(clock):
    """And says so."""
    pool = pool_of(clock, Engine())
    pool.have(backends_of("engine", draining=True))
    said = []
    with heard_by(said.append):
        waiting = asyncio.create_task(generate(pool))
    await settle()
    await clock.advance(3)
    pool.have(backends_of("engine"))
    await clock.advance(1)

    assert [5, 6] == (await waiting).generation.token_ids.tolist()
    assert ["an engine that is not drained", ""] == said


async def test_an_engine_that_fails_at_once_takes_no_generation_from_those_that_work(clock):
    """It would always be the one that is free; whoever met it asks another one."""
    engines = {name: Engine(token_s=1.0, clock=clock) for name in "bcd"}
    broken = Engine()
    broken.fail_next(*[PolicyError("500")] * 99)
    pool = pool_of(clock, a=broken, **engines)
    running = [asyncio.create_task(generate(pool, episode=f"r/g{n}/0/0")) for n in range(24)]
    await settle(200)
    await clock.advance(60)
    answers = await asyncio.wait_for(asyncio.gather(*running), 30)

    assert set(shares(answers)) == {"b", "c", "d"}


async def test_a_generation_that_no_engine_can_do_fails_with_what_the_last_one_said(clock):
    """Each is asked once."""
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.fail_next(*[PolicyRefused("no such parameter")] * 9)
    with pytest.raises(Failure, match="generation r/g/0/0/0: PolicyRefused: no such parameter"):
        await after(clock, 5, generate(pool_of(clock, a=engines[0], b=engines[1])))

    assert [1, 1] == [len(engine.calls) for engine in engines]


async def test_a_prompt_goes_where_it_fits(clock):
    """Whichever engine said first what it serves."""
    pool = pool_of(clock, a=Engine(max_model_len=10), b=Engine(max_model_len=100))
    room = (await pool.info(ANY)).max_model_len
    answers = [await pool.generate(np.arange(1, 31, dtype=np.int32), request(f"r/g{n}/0/0"), ANY) for n in range(4)]

    assert (room, shares(answers)) == (100, {"b": 4})


async def test_an_engine_that_hangs_holds_up_no_call_that_another_one_can_serve(clock):
    """One that is added, or comes to have the weights, is found while the other one is still being asked."""
    hanging, other = Engine(clock=clock), Engine(version=3)
    hanging.silent_s = 1e6
    pool = pool_of(clock, a=hanging, b=other)
    waiting = asyncio.create_task(generate(pool, Need(4)))
    await settle()
    await clock.advance(1)
    other.serve(4)
    await clock.advance(1)

    assert (await asyncio.wait_for(waiting, 5)).address == "http://b"
    await asyncio.wait_for(pool.close(), 5)


async def test_one_engine_under_another_name_is_the_same_engine(clock):
    """Its guard, its connections and what it is known to serve stay."""
    engine = Engine()
    pool = pool_of(clock, engine)
    await generate(pool)
    pool.have([Backend(name="renamed", url="http://engine")])
    await generate(pool)
    await settle()

    assert (engine.asked, engine.closed) == (1, False)


async def test_episodes_are_sized_by_engines_that_will_sample_them(clock):
    """One that is drained has room for nobody."""
    pool = pool_of(clock, a=Engine(max_model_len=100), b=Engine(max_model_len=10))
    pool.have([*backends_of("a", draining=True), *backends_of("b")])

    assert (await pool.info(ANY)).max_model_len == 10


async def test_a_prompt_that_fits_one_engine_only_waits_for_that_one(clock):
    """It lost a connection: the small one would refuse the prompt, and the attempt would be over."""
    big, small = Engine(max_model_len=100), Engine(max_model_len=10)
    pool = pool_of(clock, a=big, b=small)
    await pool.info(ANY)
    big.fail_next(PolicyUnreachable("reset"))
    answer = await after(clock, 5, pool.generate(np.arange(1, 51, dtype=np.int32), request(), ANY))

    assert (answer.address, len(big.calls), len(small.calls)) == ("http://a", 2, 0)


async def test_a_failure_is_tried_elsewhere_only_where_there_is_room(clock):
    """Else it would wait for an engine that cannot take it, and blame that."""
    big = Engine(max_model_len=100)
    big.fail_next(*[BadReply("spans with gaps")] * 9)
    pool = pool_of(clock, a=big, b=Engine(max_model_len=10))
    with pytest.raises(Failure, match="BadReply: spans with gaps"):
        await pool.generate(np.arange(1, 51, dtype=np.int32), request(), ANY)

    assert clock.monotonic() == 0


class TestWhatIsWaitedFor:
    """It is said on behalf of the episode, so that whoever looks sees it."""

    async def heard(self, clock, work, seconds=10):
        said = []
        with heard_by(said.append):
            await after(clock, seconds, work)
        return [what for what, last in zip(said, [None, *said], strict=False) if what != last]

    async def test_a_version_that_is_not_there_yet(self, clock):
        """Until it is; an engine that has it is not waited for."""
        engine = Engine(version=3)
        pool = pool_of(clock, engine)

        async def hand_over():
            await clock.sleep(3)
            engine.serve(4)

        assert [] == await self.heard(clock, pool.info(Need(3)), seconds=0)
        waited, _ = await asyncio.gather(self.heard(clock, pool.info(Need(4))), hand_over())
        assert ["policy version >= 4", ""] == waited

    async def test_an_engine_that_is_full_or_away(self, clock):
        """In the order in which it was found so."""
        engine = Engine()
        engine.fail_next(PolicyOverloaded("429"), PolicyUnreachable("gone"))

        assert ["the engine, which is full", "the engine, which is away", ""] == await self.heard(
            clock, generate(pool_of(clock, engine))
        )

    async def test_an_answer_that_comes_at_once_is_not_waited_for(self, clock):
        """Nothing is said, turn after turn."""
        assert [] == await self.heard(clock, generate(pool_of(clock, Engine())))

    async def test_whoever_queues_behind_the_question_of_another_says_so_too(self, clock):
        """One asks for all; all wait."""
        engine = Engine(version=3, clock=clock)
        engine.silent_s = 5.0
        pool = pool_of(clock, engine)
        said = {"first": [], "second": []}

        async def ask(name):
            with heard_by(said[name].append):
                await pool.info(Need(3))

        asking = [asyncio.create_task(ask(name)) for name in said]
        await settle()
        await clock.advance(6)
        await asyncio.wait_for(asyncio.gather(*asking), 30)

        assert {"first": ["policy version >= 3", ""], "second": ["policy version >= 3", ""]} == said
