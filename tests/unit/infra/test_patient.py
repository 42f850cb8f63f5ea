"""A policy that RUN can wait for, with a limit."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from infra.clock import VirtualClock, settle
from infra.errors import Failure
from infra.inference.base import BadReply, PolicyOverloaded, PolicyRefused, PolicyUnreachable, Weights
from infra.inference.patient import OTHERS_S, PatientPolicy
from infra.inference.scripted import ScriptedPolicy
from infra.waiting import heard_by
from schemas.outcome import Boundary, FailureKind
from schemas.transcript import Sampling

PROMPT = np.array([1, 2], np.int32)


class Engine(ScriptedPolicy):
    """The scripted twin, whose `info` may fail too."""

    def __init__(self, **changes):
        super().__init__(lambda prompt, seed: [5, 6], **changes)
        self.asked = 0
        self.away = False
        self.silent_s = 0.0

    async def info(self):
        self.asked += 1
        await self._clock.sleep(self.silent_s)
        if self.away:
            raise PolicyUnreachable("connection refused")
        return await super().info()

    async def generate(self, *arguments, **settings):
        if self.away:
            raise PolicyUnreachable("connection refused")
        return await super().generate(*arguments, **settings)

    def serve(self, version, run="", **changes):
        """Become another engine."""
        self._weights = Weights(version, run)
        self._digest = changes.get("digest", self._digest)


@pytest.fixture
def clock():
    return VirtualClock()


async def generate(policy):
    return await policy.generate(PROMPT, Sampling(), seed=1, request_id="r/g/0/0/0", stop_token_ids=(6,), max_tokens=9)


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
    answer = await generate(PatientPolicy(engine, clock))

    assert [5, 6] == answer.token_ids.tolist()
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
    answer = await after(clock, 60, generate(PatientPolicy(engine, clock)))

    assert (9, [5, 6]) == (len(engine.calls), answer.token_ids.tolist())


async def test_waiting_for_an_answer_has_a_limit(clock):
    """The failure says how long, for what, and what the engine said last."""
    engine = Engine()
    engine.away = True
    with pytest.raises(Failure, match="waited 30 s for generation r/g/0/0/0: connection refused") as caught:
        await after(clock, 40, generate(PatientPolicy(engine, clock, wait_s=30)))

    assert is_engine_failure(caught.value)


async def test_an_engine_that_stays_busy_is_a_rate_limit(clock):
    """It is there: another attempt comes later than after a failure of it."""
    engine = Engine()
    engine.fail_next(*[PolicyOverloaded("429")] * 99)
    with pytest.raises(Failure, match="waited 30 s for generation r/g/0/0/0: 429") as caught:
        await after(clock, 40, generate(PatientPolicy(engine, clock, wait_s=30)))

    assert (FailureKind.RATE_LIMIT, Boundary.POLICY) == (caught.value.kind, caught.value.boundary)


@pytest.mark.parametrize("error", [BadReply("spans with gaps"), PolicyRefused("no such model")])
async def test_an_answer_that_asking_again_would_not_mend_is_a_failure_at_once(clock, error):
    """Nothing is waited for."""
    engine = Engine()
    engine.fail_next(error)
    with pytest.raises(Failure, match=f"generation r/g/0/0/0: {type(error).__name__}: {error}") as caught:
        await generate(PatientPolicy(engine, clock))

    assert is_engine_failure(caught.value)
    assert clock.monotonic() == 0


async def test_what_the_engine_serves_is_asked_once(clock):
    """However many episodes begin."""
    engine = Engine(version=3)
    policy = PatientPolicy(engine, clock)
    found = await asyncio.gather(*(policy.info(2) for _ in range(10)))

    assert ({3}, 1) == ({info.version for info in found}, engine.asked)


async def test_a_version_is_waited_for(clock):
    """It comes with the next hand-over; all that wait share the question."""
    engine = Engine(version=3)
    policy = PatientPolicy(engine, clock)
    waiting = [asyncio.create_task(policy.info(4)) for _ in range(20)]
    await settle()
    await clock.advance(2)
    asked = engine.asked
    engine.serve(4)
    await clock.advance(2)

    assert {4} == {info.version for info in await asyncio.gather(*waiting)}
    assert asked < 30


async def test_a_version_that_does_not_come_is_an_engine_failure(clock):
    """It names what was waited for and what is there."""
    says = "waited 30 s for policy version >= 4; the engine has version 3 of no run"
    with pytest.raises(Failure, match=says) as caught:
        await after(clock, 31, PatientPolicy(Engine(version=3), clock, wait_s=30).info(4))

    assert is_engine_failure(caught.value)


async def test_an_engine_that_serves_another_run_is_soon_left_to_the_retries(clock):
    """It may do so for hours, and the places are for what it does serve."""
    engine = Engine()
    engine.serve(3, "theirs")
    says = "waited 10 s for policy version >= 0 of run mine; the engine has version 3 of run theirs"
    with pytest.raises(Failure, match=says) as caught:
        await after(clock, OTHERS_S + 3, PatientPolicy(engine, clock).info(0, "mine"))

    assert FailureKind.RATE_LIMIT is caught.value.kind


async def test_an_engine_that_comes_to_serve_the_run_is_waited_for(clock):
    """As when a trainer goes on whose engine another one had; weights that are nobody's are those of a restart."""
    engine = Engine()
    engine.serve(3, "theirs")
    waiting = asyncio.create_task(PatientPolicy(engine, clock).info(1, "mine"))
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
    policy = PatientPolicy(engine, clock, wait_s=30)
    waiting = [asyncio.create_task(policy.info()) for _ in range(50)]
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
    policy = PatientPolicy(engine, clock)
    await policy.info()
    engine.fail_next(PolicyUnreachable("gone"))
    engine.serve(0, digest="another")
    await after(clock, 5, generate(policy))

    assert ("another", 0) == ((await policy.info()).tokenizer_digest, (await policy.info()).version)


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
        policy = PatientPolicy(engine, clock)

        async def hand_over():
            await clock.sleep(3)
            engine.serve(4)

        assert [""] == await self.heard(clock, policy.info(3), seconds=0)
        waited, _ = await asyncio.gather(self.heard(clock, policy.info(4)), hand_over())
        assert ["policy version >= 4", ""] == waited

    async def test_an_engine_that_is_full_or_away(self, clock):
        """In the order in which it was found so."""
        engine = Engine()
        engine.fail_next(PolicyOverloaded("429"), PolicyUnreachable("gone"))

        assert ["the engine, which is full", "the engine, which is away", ""] == await self.heard(
            clock, generate(PatientPolicy(engine, clock))
        )

    async def test_an_answer_that_comes_at_once_is_not_waited_for(self, clock):
        """Nothing is said, turn after turn."""
        assert [] == await self.heard(clock, generate(PatientPolicy(Engine(), clock)))

    async def test_whoever_queues_behind_the_question_of_another_says_so_too(self, clock):
        """One asks for all; all wait."""
        engine = Engine(version=3, clock=clock)
        engine.silent_s = 5.0
        policy = PatientPolicy(engine, clock)
        said = {"first": [], "second": []}

        async def ask(name):
            with heard_by(said[name].append):
                await policy.info(3)

        asking = [asyncio.create_task(ask(name)) for name in said]
        await settle()
        await clock.advance(6)
        await asyncio.wait_for(asyncio.gather(*asking), 30)

        assert {"first": [""], "second": ["policy version >= 3", ""]} == said
