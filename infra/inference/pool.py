"""The engines that sample for a stage: a generation goes to one of them, and to another one if that does not answer.

Which engine gets what is decided in `balance.py`; here they are asked what they serve, called, and waited for. A
generation names what may sample it (`Need`); an engine whose weights do not suit, or whose tokenizer is another one,
gets nothing. A prompt holds all tokens so far, so an episode goes on at another engine with the same record; what an
engine had sampled of an answer that never came is lost with it, and nothing is joined. An engine that gives no usable
answer is passed over as long as another one suits.

Waiting happens inside the stage and raises no attempt: a task does not become worse because an engine restarts. When
the limit is reached the rollout fails, by a rate limit if there was an engine and it was busy. One that serves another
run is as good as busy, and for longer than a place in RUN should be held: the retry tiers wait for that one. An answer
that cannot be trained on, of every engine that suits, is a failure at once. An engine that nobody answers for is away:
once its guard is open it is not asked, and while all are the time does not count (`infra/guard.py`); those that are
drained or of no use are not asked whether they are. What is waited for is said on the episode's
behalf (`infra/waiting.py`).

Known here: no HTTP, no episode, and of `control` nothing: who is in the pool is told by `backends.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infra.clock import Clock
from infra.errors import Failure
from infra.guard import Guards
from infra.inference.balance import Ask, Balancer, Choice
from infra.inference.base import (
    Connect,
    ContextOverflow,
    Generation,
    ModelInfo,
    Need,
    PolicyError,
    PolicyOverloaded,
    PolicyTooSlow,
    PolicyUnreachable,
    Weights,
)
from infra.inference.pooled import POLICY, PooledEngine, named
from infra.waiting import waits_for
from schemas.control import Backend
from schemas.outcome import Boundary, FailureKind
from schemas.transcript import Sampling, TokenIds

log = logging.getLogger(__name__)

WAIT_S = 120.0
"""Longest wait for an engine that does not answer, is overloaded or behind the wanted version, seconds."""

OTHERS_S = 10.0
"""Longest wait for an engine that serves another run's weights, seconds: they are not on the way, as a version is."""

ASK_S = 0.1
"""An engine that does not suit is asked this often what it serves, seconds, while no other one suits ..."""

ASK_BESIDE_S = 2.0
"""... and this often while another one does."""

AGAIN_S = 0.5
"""Pause before it is looked again whether an engine is there, seconds, once all are away."""

SHOWN = 3
"""So many engines are told of in an error."""


class Sampled(NamedTuple):
    """An answer, and who gave it."""

    generation: Generation
    """The answer."""
    engine: ModelInfo
    """What the engine had said that it serves."""
    address: str
    """Where it is."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A generation, beside its prompt."""

    sampling: Sampling
    """How to draw."""
    seed: int
    """Decides the draw."""
    request_id: str
    """Names it in the engine's log."""
    stop_token_ids: Sequence[int]
    """Ids that end the answer and belong to it."""
    max_tokens: int
    """Most tokens of the answer."""
    episode: str
    """Whose turn it is."""
    group: str
    """Siblings, whose prompts begin alike."""


class _Wait:
    """One call's wait for an engine."""

    def __init__(self, what: str, need: Need, began_s: float, *, tokens: int = 0) -> None:
        self.what = what
        self.need = need
        self.began_s = began_s
        """When it began, in seconds that count."""
        self._said = ""
        self.tokens = tokens
        """Tokens of its prompt and answer."""
        self.refused: dict[str, PolicyError] = {}
        """Address of an engine -> how it failed this call, for which it is not asked again."""

    def say(self, what: str) -> None:
        if what != self._said:
            self._said = what
            waits_for(what)

    def over(self) -> None:
        """Say that nothing is waited for, if something was: else a caller's own wait may go on."""
        if self._said:
            waits_for("")


class PolicyPool:
    """The engines of one worker, by address."""

    def __init__(
        self, connect: Connect, clock: Clock, guards: Guards, *, wait_s: float = WAIT_S, tokenizer_digest: str = ""
    ) -> None:
        """Build an empty pool.

        Args:
            connect: makes the client of an engine.
            clock: time.
            guards: those of the worker.
            wait_s: longest wait of one call, not counting what all engines were away.
            tokenizer_digest: of the stage's own tokenizer and template; an engine with another one gets nothing.
        """
        self._connect = connect
        self._clock = clock
        self._guards = guards
        self._wait_s = wait_s
        self._digest = tokenizer_digest
        self._balancer = Balancer()
        self._engines: dict[str, PooledEngine] = {}
        self._served: dict[str, Weights] = {}
        """Address of an engine -> what it had when something was sent there last."""
        self._refused: dict[Weights, str] = {}
        """Weights that no token is taken of -> why."""
        self._leaving: set[asyncio.Task[None]] = set()

    def have(self, backends: Iterable[Backend]) -> None:
        """Be a pool of these engines; generations that run at one that leaves may end there."""
        wanted = {backend.url: backend for backend in backends}
        for address in self._engines.keys() - wanted.keys():
            self._let_go(address)
        for address, backend in wanted.items():
            if address not in self._engines:
                client = self._connect(address)
                self._engines[address] = PooledEngine(address, client, self._clock, self._guards, digest=self._digest)
            self._engines[address].draining = backend.draining
            self._balancer.add(address, self._clock.monotonic(), weight=backend.weight)
            if backend.draining:
                self._balancer.drain(address)

    def refuse(self, weights: Mapping[Weights, str]) -> None:
        """Take no token of these weights, each with the reason, and of no others."""
        self._refused = dict(weights)

    def _let_go(self, address: str) -> None:
        self._served.pop(address, None)
        self._balancer.remove(address)
        engine = self._engines.pop(address)
        engine.let_go()
        leaving = asyncio.create_task(engine.leave())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Give up all connections; nothing may run any more."""
        self.have([])
        await asyncio.gather(*self._leaving)

    async def info(self, need: Need) -> ModelInfo:
        """Return what an engine that may sample a task serves: that of the longest context, if there are several.

        Raises:
            Failure: no such engine came within the limit.
        """
        wait = _Wait(str(need), need, self._counted_s)
        while not (found := [engine for engine in await self._that_suit(wait) if not engine.draining]):
            await self._wait_on(wait)
        wait.over()
        return max((engine.info for engine in found if engine.info is not None), key=_room)

    async def generate(self, prompt: TokenIds, request: Request, need: Need) -> Sampled:
        """Sample a continuation.

        Raises:
            Failure: there is no answer to train on within the limit, or other weights than the wanted ones had a part
                in it.
        """
        tokens = len(prompt) + request.max_tokens
        wait = _Wait(f"generation {request.request_id}", need, self._counted_s, tokens=tokens)
        ask = Ask(episode=request.episode, group=request.group, prompt=len(prompt), max_tokens=request.max_tokens)
        while True:
            fit = self._with_room(wait, await self._that_suit(wait))
            free = {engine.address for engine in fit if not engine.rests_s} - wait.refused.keys()
            choice = self._balancer.choose(ask, self._clock.monotonic(), free.__contains__)
            if choice is None:
                await self._wait_on(wait)
            elif (sampled := await self._ask(choice, prompt, request, wait)) is not None:
                wait.over()
                return sampled

    async def _ask(self, choice: Choice, prompt: TokenIds, request: Request, wait: _Wait) -> Sampled | None:
        """Return an engine's answer; None if another engine, or this one later, is to be asked."""
        engine, ended = self._engines[choice.engine], False
        served = self._sends_to(engine)
        try:
            answer = await engine.call(
                lambda client: client.generate(
                    prompt,
                    request.sampling,
                    seed=request.seed,
                    request_id=request.request_id,
                    stop_token_ids=request.stop_token_ids,
                    max_tokens=request.max_tokens,
                )
            )
            self._balancer.done(choice, self._clock.monotonic(), len(answer.token_ids))
            ended = True
        except (PolicyOverloaded, PolicyUnreachable) as error:
            log.debug("%s at %s: %s", wait.what, engine.address, error)
            return None
        except PolicyError as error:
            wait.refused[engine.address] = error
            others = self._with_room(wait, [one for one in self._suitable(wait.need) if not one.draining])
            if isinstance(error, ContextOverflow | PolicyTooSlow) or not any(
                one.address not in wait.refused for one in others
            ):
                raise _failure(f"{wait.what}: {type(error).__name__}: {error}") from error
            log.warning("%s at %s, tried elsewhere: %s: %s", wait.what, engine.address, type(error).__name__, error)
            return None
        finally:
            if not ended:
                self._balancer.failed(choice)
        self._check_weights(engine, answer, wait)
        return Sampled(answer, served, engine.address)

    def _with_room(self, wait: _Wait, suitable: Sequence[PooledEngine]) -> Sequence[PooledEngine]:
        """Return those whose context a generation fits into; all, if it fits nowhere: one of them says so."""
        roomy = [engine for engine in suitable if engine.has_room_for(wait.tokens)]
        # One that cannot be asked now may be the one that has the room.
        unknown = any(e.info is None and not (e.useless or e.draining) for e in self._engines.values())
        return roomy if roomy or unknown else suitable

    def _sends_to(self, engine: PooledEngine) -> ModelInfo:
        """Return what an engine serves; if that changed since something was sent there, its caches are cold."""
        served = engine.info
        assert served is not None, "only engines that have said what they serve suit"
        if self._served.get(engine.address, served.weights) != served.weights:
            self._balancer.weights_changed(engine.address)
        self._served[engine.address] = served.weights
        return served

    def _check_weights(self, engine: PooledEngine, answer: Generation, wait: _Wait) -> None:
        for span in answer.versions:
            if (cause := self._refused.get(span.weights)) is not None:
                engine.doubted()
                raise _failure(
                    f"{wait.what}: {named(span.weights)} sampled a part of it, which is in quarantine: {cause}"
                )
            if not wait.need.suits(span.weights):
                engine.doubted()
                raise _failure(
                    f"{wait.what}: {named(span.weights)} sampled a part of it, and the task is for {wait.need}: the "
                    "engine was given another run's weights, or it restarted with the model that it was started with"
                )

    # Waiting.

    @property
    def _counted_s(self) -> float:
        """Seconds that count against limits on waits: all but those in which every engine was away."""
        return self._clock.monotonic() - self._guards.away_s(POLICY)

    async def _that_suit(self, wait: _Wait) -> list[PooledEngine]:
        """Return the engines that may sample a task; asks those that are not known to, for a moment."""
        found = self._suitable(wait.need)
        others = [engine for engine in self._engines.values() if engine not in found]
        # At the first question of all nothing is said: its answer is usually there at once.
        in_turn = any(engine.info is not None or engine.asked for engine in others)
        asked = [engine.look(ASK_BESIDE_S if found else ASK_S) for engine in others]
        questions = {question for question in asked if question is not None}
        if questions and not found:
            if in_turn:
                wait.say(str(wait.need))
            await self._first_of(questions)
            found = self._suitable(wait.need)
        for engine in found:
            if engine.came_back():
                self._balancer.away(engine.address)
                self._balancer.back(engine.address, self._clock.monotonic())
        return found

    def _suitable(self, need: Need) -> list[PooledEngine]:
        return [
            engine
            for engine in self._engines.values()
            if engine.suits(need) and not (engine.info is not None and engine.info.weights in self._refused)
        ]

    async def _first_of(self, questions: set[asyncio.Task[None]]) -> None:
        """Wait for one answer; an engine that hangs must not hold up those that come meanwhile."""
        pause = asyncio.create_task(self._clock.sleep(ASK_S))
        try:
            await asyncio.wait({*questions, pause}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()

    async def _wait_on(self, wait: _Wait) -> None:
        """Wait a little for an engine. Raises Failure when that has gone on for too long, or is in vain."""
        engines = [engine for engine in self._engines.values() if not engine.draining]
        if engines and all(engine.useless for engine in engines):
            raise _failure(self._state())
        able = [engine for engine in engines if not (engine.useless or engine.serves_another(wait.need))]
        if able and all(engine.away for engine in able) and self._guards.away(POLICY):
            wait.say("the engine, which is away")
            await self._clock.sleep(AGAIN_S)
            return
        waited_s = self._counted_s - wait.began_s
        if waited_s > self._wait_s:
            kind = FailureKind.RATE_LIMIT if any(engine.full for engine in engines) else FailureKind.ENGINE
            raise _failure(f"waited {self._wait_s:g} s for {wait.what}; {self._state()}", kind)
        if engines and not able and waited_s > OTHERS_S:
            raise _failure(f"waited {OTHERS_S:g} s for {wait.what}; {self._state()}", FailureKind.RATE_LIMIT)
        wait.say(self._lacking(wait.need, engines))
        await self._clock.sleep(max(ASK_S, min((engine.rests_s for engine in engines if engine.rests_s), default=0.0)))

    def _lacking(self, need: Need, engines: Sequence[PooledEngine]) -> str:
        if any(engine.full for engine in engines):
            return "the engine, which is full"
        if engines and all(engine.away for engine in engines):
            return "the engine, which is away"
        if any(engine.asked or (engine.info is not None and not engine.suits(need)) for engine in engines):
            return str(need)
        return "the engine, which is away" if engines else "an engine that is not drained"

    def _state(self) -> str:
        """Return what there is to say of the engines."""
        told = [f"{engine.address}: {engine.state()}" for engine in self._engines.values()]
        more = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        return ("; ".join(told[:SHOWN]) or "there is no engine") + more


def _room(info: ModelInfo) -> float:
    return info.max_model_len or math.inf


def _failure(cause: str, kind: FailureKind = FailureKind.ENGINE) -> Failure:
    return Failure(kind, Boundary.POLICY, cause)
