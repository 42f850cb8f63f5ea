"""One engine of a pool: what it serves, whether it is there, and when it may be called again.

An engine that could not be reached may be another one when it is back, so what it serves is asked again then. One that
is overloaded or not reached is left alone for a while that doubles, however many generations found it so at once. Which
engine is called is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from infra.clock import Clock
from infra.guard import Guard
from infra.inference.base import (
    PROCESSED_LOGPROBS,
    ModelInfo,
    Need,
    PolicyClient,
    PolicyError,
    PolicyOverloaded,
    PolicyUnreachable,
    Weights,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
"""Pause before an engine that is full or not reached is called again, seconds; it doubles with each further time."""

LONGEST_PAUSE_S = 2.0
"""Longest pause, seconds."""


async def answers(client: PolicyClient) -> bool:
    """Tell whether there is an engine at all, whatever it answers: the probe of its guard."""
    try:
        await client.info()
    except PolicyUnreachable:
        return False
    except PolicyError as error:
        log.info("the engine is there, but: %s", error)
    return True


class PooledEngine:
    """One engine.

    Attributes:
        name: of the engine in the pool.
        address: where it is.
        info: what it serves, as far as known; none before it was asked, and after it was not reached.
    """

    def __init__(
        self, name: str, address: str, client: PolicyClient, clock: Clock, guard: Guard, *, digest: str = ""
    ) -> None:
        """Build an engine that nobody has asked yet.

        Args:
            name: of the engine in the pool.
            address: where it is.
            client: calls it.
            clock: time.
            guard: stands before it.
            digest: of the tokenizer and template that prompts are made with; any if empty.
        """
        self.name = name
        self.address = address
        self.info: ModelInfo | None = None
        self._client = client
        self._clock = clock
        self._guard = guard
        self._digest = digest
        self._flaw = ""
        """Why no prompt of ours may go there, whatever its weights are."""
        self._said = ""
        """The flaw that was logged last."""
        self._trouble: PolicyError | None = None
        """Why the last call failed, if the engine was full or not reached."""
        self._pause_s = FIRST_PAUSE_S
        self._rests_until = -math.inf
        self._asked_at = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def guard(self) -> Guard:
        """Stands before it."""
        return self._guard

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
    def rests(self) -> bool:
        """Tell whether it is left alone for now."""
        return self.rests_s > 0

    @property
    def asked(self) -> bool:
        """Tell whether it is being asked what it serves."""
        return self._asking is not None

    def suits(self, need: Need) -> bool:
        """Tell whether it may sample a task, as far as known."""
        return not self.away and not self._flaw and self.info is not None and need.suits(self.info.weights)

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

    async def call(self, ask: Callable[[PolicyClient], Awaitable[T]]) -> T:
        """Call it and take note of how that ends. Raises PolicyError as the client does."""
        self._in_flight += 1
        self._idle.clear()
        try:
            answer = await ask(self._client)
        except PolicyUnreachable as error:
            self.info = None
            self._guard.failed(str(error))
            self._rest(error)
            raise
        except PolicyOverloaded as error:
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
        if not self.rests:  # else another call has found the same
            self._rests_until = self._clock.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def look(self, every_s: float) -> asyncio.Task[None] | None:
        """Ask what it serves, once for all who want to know and not more often than this; return the question."""
        now = self._clock.monotonic()
        if self._asking is None and not self.away and not self.rests and now >= self._asked_at + every_s:
            self._asked_at = now
            self._asking = asyncio.create_task(self._look())
        return self._asking

    async def _look(self) -> None:
        try:
            self.info = await self.call(lambda client: client.info())
            self._flaw = flaw_of(self.info, self._digest)
        except (PolicyOverloaded, PolicyUnreachable) as error:
            log.debug("%s at %s: %s", self.name, self.address, error)
        except PolicyError as error:
            self._flaw = f"{type(error).__name__}: {error}"
        finally:
            self._asking = None
        if self._flaw != self._said:
            self._said = self._flaw
            log.warning("engine %s at %s: %s", self.name, self.address, self._flaw or "is of use again")

    def doubted(self) -> None:
        """Take that it serves something else than it said."""
        self.info, self._asked_at = None, -math.inf

    async def leave(self) -> None:
        """Give up its connections once what runs there has ended."""
        await self._idle.wait()
        if self._asking is not None:
            self._asking.cancel()
        await self._client.close()


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
