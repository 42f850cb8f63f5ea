"""One engine of a pool: what it serves, whether it is there, and when it may be called again.

An engine that could not be reached may be another one when it is back, so what it serves is asked again then. One that
gave no usable answer is left alone for a while that doubles, however many generations found it so at once: one that
fails fast would else be the one that is always free. Which engine is called is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from infra.clock import Clock
from infra.guard import Guards
from infra.inference.base import (
    PROCESSED_LOGPROBS,
    ContextOverflow,
    ModelInfo,
    Need,
    PolicyClient,
    PolicyError,
    PolicyOverloaded,
    PolicyTooSlow,
    PolicyUnreachable,
    Weights,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

POLICY = "policy"
"""Name of the service."""

FIRST_PAUSE_S = 0.1
"""Pause before an engine that gave no usable answer is called again, seconds; it doubles with each further time."""

LONGEST_PAUSE_S = 2.0
"""Longest pause, seconds."""

LOOK_S = 10.0
"""An engine that does not say what it serves within this is not there, seconds."""


async def answers(client: PolicyClient) -> bool:
    """Tell whether there is an engine at all, whatever it answers: the probe of its guard."""
    try:
        await served_by(client)
    except PolicyUnreachable:
        return False
    except PolicyError as error:
        log.info("the engine is there, but: %s", error)
    return True


class PooledEngine:
    """One engine.

    Attributes:
        address: where it is.
        info: what it serves, as far as known; none before it was asked, and after it was not reached.
    """

    def __init__(self, address: str, client: PolicyClient, clock: Clock, guards: Guards, *, digest: str = "") -> None:
        """Build an engine that nobody has asked yet.

        Args:
            address: where it is.
            client: calls it.
            clock: time.
            guards: those of the worker; one of them stands before it.
            digest: of the tokenizer and template that prompts are made with; any if empty.
        """
        self.address = address
        self.info: ModelInfo | None = None
        self._client = client
        self._clock = clock
        self._guards = guards
        self._guard = guards.guard(POLICY, address, lambda: answers(client))
        self._digest = digest
        self._draining = False
        self._flaw = ""
        """Why no prompt of ours may go there, whatever its weights are."""
        self._trouble: PolicyError | None = None
        """Why the last call failed, if the engine is to blame."""
        self._was_away = False
        self._pause_s = FIRST_PAUSE_S
        self._rests_until = -math.inf
        self._asked_at = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def away(self) -> bool:
        """Tell whether it is known not to be there."""
        return self._guard.open

    @property
    def full(self) -> bool:
        """Tell whether it is there and takes no work."""
        return isinstance(self._trouble, PolicyOverloaded)

    @property
    def useless(self) -> bool:
        """Tell whether it is there, and no weights would make it suit."""
        return bool(self._flaw)

    @property
    def rests_s(self) -> float:
        """For how long it is left alone from now on, seconds."""
        return max(0.0, self._rests_until - self._clock.monotonic())

    @property
    def asked(self) -> bool:
        """Tell whether it is being asked what it serves."""
        return self._asking is not None

    @property
    def draining(self) -> bool:
        """Tell whether it is given nothing new."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        self._count()

    def suits(self, need: Need) -> bool:
        """Tell whether it may sample a task, as far as known."""
        return not self.away and not self._flaw and self.info is not None and need.suits(self.info.weights)

    def has_room_for(self, tokens: int) -> bool:
        """Tell whether so many tokens, prompt and answer together, fit into its context, as far as known."""
        return self.info is None or not self.info.max_model_len or tokens <= self.info.max_model_len

    def serves_another(self, need: Need) -> bool:
        """Tell whether it has weights that some other run than the wanted one numbered."""
        return self.info is not None and need.weights_of is not None and self.info.run not in {"", need.weights_of}

    def state(self) -> str:
        """Return what there is to say of it."""
        if self._flaw:
            return self._flaw
        if self._trouble is not None:
            return str(self._trouble)
        return "not known yet" if self.info is None else f"it has {named(self.info.weights)}"

    def came_back(self) -> bool:
        """Tell, once, that it was away and is there again."""
        came_back, self._was_away = self._was_away and self.info is not None, self._was_away and self.info is None
        return came_back

    async def call(self, ask: Callable[[PolicyClient], Awaitable[T]]) -> T:
        """Call it and take note of how that ends. Raises PolicyError as the client does."""
        self._in_flight += 1
        self._idle.clear()
        try:
            answer = await ask(self._client)
        except PolicyUnreachable as error:
            self.info = None
            self._guard.failed(str(error))
            self._was_away |= self.away
            self._rest(error)
            raise
        except PolicyTooSlow:
            raise  # that was about the generation, and nobody answered
        except PolicyError as error:
            self._guard.succeeded()  # it is there, whatever it says
            if not isinstance(error, ContextOverflow):
                self._rest(error)
            raise
        else:
            self._guard.succeeded()
            self._trouble, self._pause_s = None, FIRST_PAUSE_S
            return answer
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _rest(self, error: PolicyError) -> None:
        self._trouble = error
        if not self.rests_s:  # else another call has found the same
            self._rests_until = self._clock.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def look(self, every_s: float) -> asyncio.Task[None] | None:
        """Ask what it serves, once for all who want to know and not more often than this; return the question."""
        now = self._clock.monotonic()
        if self._asking is None and not self.away and not self.rests_s and now >= self._asked_at + every_s:
            self._asked_at = now
            self._asking = asyncio.create_task(self._look())
            self._asking.add_done_callback(self._looked)
        return self._asking

    async def _look(self) -> None:
        before = self._flaw
        try:
            self.info = await self.call(served_by)
            self._flaw = flaw_of(self.info, self._digest)
        except (PolicyOverloaded, PolicyUnreachable) as error:
            log.debug("%s: %s", self.address, error)
        except PolicyError as error:
            self._flaw = f"{type(error).__name__}: {error}"
        if self._flaw != before:
            log.warning("engine at %s: %s", self.address, self._flaw or "is of use again")
            self._count()

    def _looked(self, question: asyncio.Task[None]) -> None:
        self._asking = None
        if not question.cancelled() and (error := question.exception()) is not None:
            log.error("engine at %s: asking what it serves broke", self.address, exc_info=error)

    def _count(self) -> None:
        """Say whether the worker can work for as long as this engine is there."""
        self._guards.count(self._guard, counts=not (self._draining or self._flaw))

    def doubted(self) -> None:
        """Take that it serves something else than it said."""
        self.info, self._asked_at = None, -math.inf

    def let_go(self) -> None:
        """Take that it is in the pool no longer; should it come again, it has another guard."""
        self._guards.let_go(self._guard)
        if self._asking is not None:
            self._asking.cancel()

    async def leave(self) -> None:
        """Give up its connections once what runs there has ended."""
        await self._idle.wait()
        await self._client.close()


async def served_by(client: PolicyClient) -> ModelInfo:
    """Return what an engine serves. Raises PolicyError; PolicyUnreachable, too, where it does not say so in time."""
    try:
        async with asyncio.timeout(LOOK_S):
            return await client.info()
    except TimeoutError as error:
        raise PolicyUnreachable(f"it did not say what it serves within {LOOK_S:g} s") from error


def flaw_of(info: ModelInfo, digest: str = "") -> str:
    """Return why an engine cannot be used, whatever its weights are; empty if it can.

    Args:
        info: what it serves.
        digest: of the tokenizer and template that prompts are made with; any if empty.
    """
    if info.tokenizer_digest and digest and info.tokenizer_digest != digest:
        return (
            f"the engine's tokenizer {info.tokenizer_digest[:12]} is not this stage's {digest[:12]}: give both the "
            "same model directory"
        )
    if info.logprobs_mode != PROCESSED_LOGPROBS:
        return (
            f"the engine gives {info.logprobs_mode or 'no'} log-probs, and only {PROCESSED_LOGPROBS} can be trained "
            f"on: start vLLM with --logprobs-mode {PROCESSED_LOGPROBS}"
        )
    return ""


def named(weights: Weights) -> str:
    """Return weights for a person."""
    return f"version {weights.version} of {f'run {weights.run}' if weights.run else 'no run'}"
