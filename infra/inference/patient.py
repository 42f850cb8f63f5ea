"""A policy that RUN can wait for: overload, a restart of the engine and a missing version are waited out, bounded.

Waiting happens inside the stage and raises no attempt: a task does not become worse because an engine restarts. When
the limit is reached the rollout fails, by a rate limit if the engine was there and busy. One that serves another run is
as good as busy, and for longer than a place in RUN should be held: the retry tiers wait for that one. An answer that
cannot be trained on is a failure at once. An engine that nobody answers for is away: once its guard is open it is not
asked, and the time does not count (`infra/guard.py`). One that is overloaded is there, and says so itself: it is asked
again for as long as the limit allows. What the engine serves is asked once and kept until the engine was away: another
one may have taken its place. What an episode waits for is said on its behalf (`infra/waiting.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from infra.clock import Clock
from infra.errors import Failure
from infra.guard import Guard, Guards, unguarded
from infra.inference.base import (
    Generation,
    ModelInfo,
    PolicyClient,
    PolicyError,
    PolicyOverloaded,
    PolicyUnreachable,
    Weights,
)
from infra.waiting import waits_for
from schemas.outcome import Boundary, FailureKind
from schemas.transcript import Sampling, TokenIds

log = logging.getLogger(__name__)

T = TypeVar("T")

POLICY = "policy"
"""Name of the service."""

WAIT_S = 120.0
"""Longest wait for an engine that does not answer, is overloaded or behind the wanted version, seconds."""

OTHERS_S = 10.0
"""Longest wait for an engine that serves another run's weights, seconds: they are not on the way, as a version is."""

FIRST_BACKOFF_S = 0.1
"""Pause before an engine is asked again, seconds; it doubles with each further time."""

LONGEST_BACKOFF_S = 2.0
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


class PatientPolicy:
    """One policy engine, asked again while it is away."""

    def __init__(
        self, client: PolicyClient, clock: Clock, *, wait_s: float = WAIT_S, guard: Guard | None = None
    ) -> None:
        """Build it.

        Args:
            client: the engine.
            clock: time.
            wait_s: longest wait of one call, not counting what the guard was open.
            guard: stands before the engine; without it an engine that is away is asked for `wait_s`.
        """
        self._client = client
        self._clock = clock
        self._wait_s = wait_s
        self._guard = guard or unguarded(clock)
        self._info: ModelInfo | None = None
        self._again_s = -math.inf
        """When that may be asked again."""
        self._refreshing = asyncio.Lock()

    async def info(self, min_version: int = 0, weights_of: str | None = None) -> ModelInfo:
        """Return what the engine serves, once its version is at least min_version, and of the wanted run.

        Raises:
            Failure: the version did not come, or the engine did not answer, within the limit.
        """
        since = self._guard.counted_s
        until = since + self._wait_s
        wanted = f"policy version >= {min_version}" + (f" of run {weights_of}" if weights_of is not None else "")
        while self._info is None or not _suits(self._info.weights, min_version, weights_of):
            if self._guard.counted_s > until:
                raise _failure(f"waited {self._wait_s:g} s for {wanted}; {_what_it_has(self._info)}")
            if _serves_another(self._info, weights_of) and self._guard.counted_s > since + OTHERS_S:
                cause = f"waited {OTHERS_S:g} s for {wanted}; {_what_it_has(self._info)}"
                raise _failure(cause, FailureKind.RATE_LIMIT)
            if self._info is not None or self._refreshing.locked():
                # Not at the first question of all: its answer is usually there at once.
                waits_for(wanted)
            await self._refresh(until)
        waits_for("")
        return self._info

    async def _refresh(self, until: float) -> None:
        """Ask the engine once for all episodes that wait, and not more often than every `FIRST_BACKOFF_S`."""
        seen = self._info
        async with self._refreshing:
            if self._info is not seen or self._guard.counted_s > until:
                return  # somebody asked meanwhile, or waited long enough for both
            if self._info is None or self._clock.monotonic() >= self._again_s:
                self._info = await self._patiently("the engine's version", self._client.info, until)
                self._again_s = self._clock.monotonic() + FIRST_BACKOFF_S
                return
        await self._clock.sleep(FIRST_BACKOFF_S)

    async def generate(
        self,
        prompt: TokenIds,
        sampling: Sampling,
        *,
        seed: int,
        request_id: str,
        stop_token_ids: Sequence[int],
        max_tokens: int,
        min_version: int = 0,
        weights_of: str | None = None,
    ) -> Generation:
        """Sample a continuation.

        Raises:
            Failure: there is no answer to train on within the limit, or other weights than the wanted ones had a part
                in it.
        """

        async def ask() -> Generation:
            return await self._client.generate(
                prompt,
                sampling,
                seed=seed,
                request_id=request_id,
                stop_token_ids=stop_token_ids,
                max_tokens=max_tokens,
            )

        answer = await self._patiently(f"generation {request_id}", ask, self._guard.counted_s + self._wait_s)
        for span in answer.versions:
            if not _suits(span.weights, min_version, weights_of):
                self._info = None  # the engine serves something else than it said
                raise _failure(
                    f"generation {request_id}: {_named(span.weights)} sampled a part of it, and the task is for "
                    f"version >= {min_version} of run {weights_of}: another run's weights came into the engine, or it "
                    "restarted with the model that it was started with"
                )
        return answer

    async def _patiently(self, what: str, ask: Callable[[], Awaitable[T]], until: float) -> T:
        backoff_s, waited = FIRST_BACKOFF_S, False
        while True:
            if self._guard.open:
                waited = True
                waits_for("the engine, which is away")
                await self._guard.closed()
            try:
                answer = await ask()
            except (PolicyOverloaded, PolicyUnreachable) as error:
                if isinstance(error, PolicyUnreachable):
                    self._info = None
                    self._guard.failed(str(error))
                if self._guard.counted_s > until:
                    kind = FailureKind.RATE_LIMIT if isinstance(error, PolicyOverloaded) else FailureKind.ENGINE
                    raise _failure(f"waited {self._wait_s:g} s for {what}: {error}", kind) from error
                waited = True
                waits_for("the engine, which is " + ("full" if isinstance(error, PolicyOverloaded) else "away"))
                log.debug("%s: asked again in %.1f s: %s", what, backoff_s, error)
                await self._clock.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
            except PolicyError as error:
                raise _failure(f"{what}: {type(error).__name__}: {error}") from error
            else:
                self._guard.succeeded()
                if waited:  # else a caller's own wait may go on
                    waits_for("")
                return answer


def patient_policy(
    client: PolicyClient, address: str, clock: Clock, guards: Guards, *, wait_s: float = WAIT_S
) -> PatientPolicy:
    """Return a policy behind a guard of the worker."""
    guard = guards.guard(POLICY, address, lambda: answers(client))
    return PatientPolicy(client, clock, wait_s=wait_s, guard=guard)


def _suits(weights: Weights, min_version: int, weights_of: str | None) -> bool:
    """Tell whether a task may be sampled by these weights; those that an engine was started with are no run's."""
    return weights.version >= min_version and weights_of in {None, weights.run}


def _serves_another(info: ModelInfo | None, weights_of: str | None) -> bool:
    """Tell whether the engine has weights that some other run numbered."""
    return info is not None and weights_of is not None and info.weights.run not in {"", weights_of}


def _what_it_has(info: ModelInfo | None) -> str:
    if info is None:
        return "what the engine has is not known"
    return f"the engine has {_named(info.weights)}"


def _named(weights: Weights) -> str:
    return f"version {weights.version} of {f'run {weights.run}' if weights.run else 'no run'}"


def _failure(cause: str, kind: FailureKind = FailureKind.ENGINE) -> Failure:
    return Failure(kind, Boundary.POLICY, cause)
