"""A policy that RUN can wait for: overload, a restart of the engine and a missing version are waited out, bounded.

Waiting happens inside the stage and raises no attempt: a task does not become worse because an engine restarts. When
the limit is reached the rollout fails, by a rate limit if the engine was there and busy. An answer that cannot be
trained on is a failure at once. What the engine serves is asked once and kept until the engine was away: another one
may have taken its place. What an episode waits for is said on its behalf (`infra/waiting.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from infra.clock import Clock
from infra.errors import Failure
from infra.inference.base import (
    Generation,
    ModelInfo,
    PolicyClient,
    PolicyError,
    PolicyOverloaded,
    PolicyUnreachable,
)
from infra.waiting import waits_for
from schemas.outcome import Boundary, FailureKind
from schemas.transcript import Sampling, TokenIds

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_S = 120.0
"""Longest wait for an engine that is away, overloaded or behind the wanted version, seconds."""

FIRST_BACKOFF_S = 0.1
"""Pause before an engine is asked again, seconds; it doubles with each further time."""

LONGEST_BACKOFF_S = 2.0
"""Longest pause, seconds."""


class PatientPolicy:
    """One policy engine, asked again while it is away."""

    def __init__(self, client: PolicyClient, clock: Clock, *, wait_s: float = WAIT_S) -> None:
        self._client = client
        self._clock = clock
        self._wait_s = wait_s
        self._info: ModelInfo | None = None
        self._refreshing = asyncio.Lock()

    async def info(self, min_version: int = 0) -> ModelInfo:
        """Return what the engine serves, once its version is at least min_version.

        Raises:
            Failure: the version did not come, or the engine did not answer, within the limit.
        """
        until = self._clock.monotonic() + self._wait_s
        while self._info is None or self._info.version < min_version:
            if self._clock.monotonic() > until:
                has = "none" if self._info is None else self._info.version
                raise _failure(f"waited {self._wait_s:g} s for policy version {min_version}; the engine has {has}")
            if self._info is not None or self._refreshing.locked():
                # Not at the first question of all: its answer is usually there at once.
                waits_for(f"policy version >= {min_version}")
            await self._refresh(min_version, until)
        waits_for("")
        return self._info

    async def _refresh(self, min_version: int, until: float) -> None:
        """Ask the engine once for all episodes that wait."""
        async with self._refreshing:
            if self._info is not None and self._info.version >= min_version:
                return
            if self._clock.monotonic() > until:
                return  # whoever asked before waited long enough for both
            found = self._info = await self._patiently("the engine's version", self._client.info, until)
            if found.version < min_version:
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
    ) -> Generation:
        """Sample a continuation. Raises Failure when there is no answer to train on within the limit."""

        async def ask() -> Generation:
            return await self._client.generate(
                prompt,
                sampling,
                seed=seed,
                request_id=request_id,
                stop_token_ids=stop_token_ids,
                max_tokens=max_tokens,
            )

        return await self._patiently(f"generation {request_id}", ask, self._clock.monotonic() + self._wait_s)

    async def _patiently(self, what: str, ask: Callable[[], Awaitable[T]], until: float) -> T:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                answer = await ask()
            except (PolicyOverloaded, PolicyUnreachable) as error:
                if isinstance(error, PolicyUnreachable):
                    self._info = None
                if self._clock.monotonic() > until:
                    kind = FailureKind.RATE_LIMIT if isinstance(error, PolicyOverloaded) else FailureKind.ENGINE
                    raise _failure(f"waited {self._wait_s:g} s for {what}: {error}", kind) from error
                waits_for("the engine, which is " + ("full" if isinstance(error, PolicyOverloaded) else "away"))
                log.debug("%s: asked again in %.1f s: %s", what, backoff_s, error)
                await self._clock.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
            except PolicyError as error:
                raise _failure(f"{what}: {type(error).__name__}: {error}") from error
            else:
                if backoff_s > FIRST_BACKOFF_S:  # it was waited for; a caller's own wait may go on otherwise
                    waits_for("")
                return answer


def _failure(cause: str, kind: FailureKind = FailureKind.ENGINE) -> Failure:
    return Failure(kind, Boundary.POLICY, cause)
