"""The in-memory twin of a policy engine: it says what a function tells it to, and fails when told to.

It keeps every promise of `PolicyClient` (one contract test runs against it and against the real server) and shows what
was asked of it. A generation moves one token per turn of the event loop, or per `token_s` of the clock, so that a
pause, a change of weights or a cancellation can fall between two tokens. It does not know HTTP or models.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from infra.clock import Clock, SystemClock
from infra.inference.base import (
    PROCESSED_LOGPROBS,
    ContextOverflow,
    FinishReason,
    Generation,
    ModelInfo,
    ModelPathMissing,
    PauseMode,
    PolicyError,
    PolicyRefused,
    VersionSpan,
    Weights,
    token_limit,
)
from infra.inference.ends import ending
from schemas.transcript import LogProbs, Sampling, TokenIds

Script = Callable[[TokenIds, int], Sequence[int]]
"""What to answer: from the prompt and the seed to ids, cut at a stop id or at the limit of tokens."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One `generate` that was asked for."""

    request_id: str
    prompt: TokenIds
    sampling: Sampling
    seed: int
    stop_token_ids: tuple[int, ...]
    max_tokens: int


def noise(vocabulary: int, length: int) -> Script:
    """Return a script of hashed ids that depend on prompt and seed, `length` tokens long."""

    def script(prompt: TokenIds, seed: int) -> list[int]:
        digest = hashlib.shake_128(prompt.tobytes() + seed.to_bytes(16, "little", signed=True)).digest(length)
        return [byte % vocabulary for byte in digest]

    return script


def scripted_scores(weights: Weights, ids: TokenIds) -> LogProbs:
    """Return log-probs that the twin's weights give to ids; other weights are nats away."""
    seed = hashlib.blake2b(f"{weights}".encode() + ids.tobytes(), digest_size=8).digest()
    return -10 * np.random.default_rng(int.from_bytes(seed, "little")).random(len(ids) - 1, dtype=np.float32)


class ScriptedPolicy:
    """A policy that follows a script."""

    def __init__(
        self,
        script: Script,
        *,
        max_model_len: int = 8192,
        version: int = 0,
        tokenizer_digest: str = "scripted",
        token_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        """Wait for calls.

        Args:
            script: what to answer; an answer that ends neither with a stop id nor at the limit ends as `stop`.
            max_model_len: prompt and answer, tokens.
            version: version of the weights at the start.
            tokenizer_digest: what `info` says.
            token_s: time that a token takes, seconds.
            clock: what that time is measured with.
        """
        self.calls: list[Call] = []
        """All calls of `generate`, in order."""
        self.cancelled: list[str] = []
        """Names of generations that were cancelled by their caller."""
        self.loaded: list[tuple[Path, int]] = []
        """Directories that were loaded, with their versions."""
        self.sampled = 0
        """Tokens sampled so far."""
        self.scores: Callable[[Weights, TokenIds], LogProbs] = scripted_scores
        """What `score` answers."""
        self._script = script
        self._max_model_len = max_model_len
        self._weights = Weights(version)
        self._digest = tokenizer_digest
        self._token_s = token_s
        self._clock = clock or SystemClock()
        self._failures: deque[PolicyError] = deque()
        self._mode: PauseMode | None = None
        self._changed = asyncio.Condition()
        self._running: set[object] = set()
        self._aborting: set[object] = set()

    def fail_next(self, *errors: PolicyError) -> None:
        """Raise these errors from the next calls of `generate`, one each."""
        self._failures.extend(errors)

    async def generate(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer],
        sampling: Sampling,
        *,
        seed: int,
        request_id: str,
        stop_token_ids: Sequence[int] = (),
        max_tokens: int | None = None,
    ) -> Generation:
        """Answer by the script; see `PolicyClient`."""
        prompt = np.asarray(token_ids, dtype=np.int32)
        limit = token_limit(sampling, max_tokens)
        call = Call(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            seed=seed,
            stop_token_ids=tuple(stop_token_ids),
            max_tokens=min(limit, self._max_model_len - len(prompt)),
        )
        self.calls.append(call)
        if self._failures:
            raise self._failures.popleft()
        if not len(prompt):
            raise PolicyRefused("the prompt is empty; a policy needs at least one token")
        if call.max_tokens < 1:
            raise ContextOverflow(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {self._max_model_len}"
            )
        try:
            return await self._play(call)
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise

    async def score(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> LogProbs:
        """Answer as `scores` says; see `PolicyClient`."""
        ids = np.asarray(token_ids, dtype=np.int32)
        if len(ids) < 2:
            raise PolicyRefused("a prompt of fewer than two ids has nothing to score")
        return self.scores(self._weights, ids)

    async def info(self) -> ModelInfo:
        """Say what is served now."""
        return ModelInfo(
            model="scripted",
            tokenizer_digest=self._digest,
            max_model_len=self._max_model_len,
            version=self._weights.version,
            run=self._weights.run,
            dtype="float32",
            logprobs_mode=PROCESSED_LOGPROBS,
            scores_paused=True,
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling until `resume`; the twin's lease does not end."""
        async with self._changed:
            self._mode = mode
            if mode == "abort":
                self._aborting |= self._running
            self._changed.notify_all()
            if mode == "wait":
                await self._changed.wait_for(lambda: not self._running)

    async def resume(self) -> None:
        """Sample on."""
        async with self._changed:
            self._mode = None
            self._changed.notify_all()

    async def load(self, directory: Path, version: int, run: str = "") -> None:
        """Take over a version of a run; the directory must exist, its content does not matter."""
        if self._mode is None:
            raise PolicyRefused("weights change only while the engine is paused: call pause first")
        if not directory.is_dir():  # noqa: ASYNC240 - one stat of a local directory, in a twin
            raise ModelPathMissing(f"no directory {directory}: publish the weights before announcing them")
        self.loaded.append((directory, version))
        self._weights = Weights(version, run)

    @property
    def paused(self) -> bool:
        """Tell whether sampling is stopped."""
        return self._mode is not None

    async def label(self, weights: Weights) -> None:
        """Say which weights are in place."""
        self._weights = weights

    async def close(self) -> None:
        """Nothing to give up."""

    async def _play(self, call: Call) -> Generation:
        key = object()
        async with self._changed:
            # A request that arrives during a pause waits for its end, whatever the mode.
            await self._changed.wait_for(lambda: self._mode is None)
            self._running.add(key)
        try:
            return await self._tokens(call, key)
        finally:
            self._running.discard(key)
            self._aborting.discard(key)
            async with self._changed:
                self._changed.notify_all()

    async def _tokens(self, call: Call, key: object) -> Generation:
        ids: list[int] = []
        weights: list[Weights] = []
        reason: FinishReason = "stop"
        for token in self._script(call.prompt, call.seed):
            await self._clock.sleep(self._token_s)
            async with self._changed:
                await self._changed.wait_for(lambda: self._mode != "keep" or key in self._aborting)
            if key in self._aborting:
                reason = "abort"
                break
            ids.append(int(token))
            weights.append(self._weights)
            self.sampled += 1
            if token in call.stop_token_ids:
                break
            if (end := ending(ids, call.sampling)) is not None:
                reason = end
                break
            if len(ids) == call.max_tokens:
                reason = "length"
                break
        return Generation(
            token_ids=np.array(ids, dtype=np.int32),
            # Any finite log-prob will do; this one tells positions apart.
            logprobs=-0.5 - 0.001 * np.arange(len(ids), dtype=np.float32),
            finish_reason=reason,
            versions=_spans(weights),
        )


def _spans(weights: Sequence[Weights]) -> tuple[VersionSpan, ...]:
    """Return the stretches of tokens that the same weights sampled."""
    starts = [i for i, these in enumerate(weights) if i == 0 or these != weights[i - 1]]
    return tuple(
        VersionSpan(start=start, stop=stop, **weights[start]._asdict())
        for start, stop in zip(starts, [*starts[1:], len(weights)], strict=True)
    )
