"""The seam to a policy engine: token ids in, sampled ids with log-probs and weight versions out.

What every `PolicyClient` promises:

- the ids returned are the ids sampled, each with the log-prob of the distribution it was drawn from (after
  temperature, top-k, top-p and min-p); at temperature 0 the token is the likeliest one and its log-prob is that of the
  unprocessed distribution (temperature 1), as vLLM reports it;
- the version spans cover the ids without a gap, and a span names the weights that sampled its tokens;
- one seed and one prompt give one answer, whatever else the engine computes meanwhile (up to float noise);
- a stop token or stop sequence is part of the answer; only the ids in `stop_token_ids` and the rules of the sampling
  parameters stop, never a default of the engine, and a stop token is named as the reason before any rule;
- cancelling `generate` ends the generation in the engine too.

Anything else is one of the errors below; nothing is padded, re-encoded or retried here. This file does not know HTTP,
torch, text or turns.

Error tree::

    PolicyError (ServiceError)    the engine did not give a usable answer
      PolicyUnreachable           nobody answered, or the connection broke
      PolicyOverloaded            it answered "not now" (429, 503)
      PolicyTooSlow               it was there, and a generation did not end within its limit
      PolicyRefused               it answered that the request cannot be done
        ContextOverflow           the prompt leaves no room in the model's context
        ModelPathMissing          the directory of weights does not exist or holds no weights
      BadReply                    it answered nonsense: ids or log-probs missing, short or not finite, spans with gaps
      WrongWeights                it has loaded a version, and does not have it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from infra.errors import ServiceError
from schemas.transcript import LogProbs, Sampling, TokenIds

FinishReason = Literal["stop", "length", "abort", "stop_sequence", "repetition"]
"""Why a generation ended: at a stop id, at its limit of tokens, by a rule of its sampling parameters (`ends.py`), or
because somebody withdrew it: `abort`, with the ids sampled until then."""
PauseMode = Literal["keep", "wait", "abort"]
"""What happens to running generations at a pause: frozen until `resume`, finished first, or ended with `abort`."""

NumberFormat = Literal["float32", "bfloat16", "float16", "int8"]
"""What the weights of the local server may be; int8 is that of linear layers, beside which the rest is float32."""

PROCESSED_LOGPROBS = "processed_logprobs"
"""The only log-prob mode that may be trained on: it says what the sampled distribution was."""


class PolicyError(ServiceError):
    """The policy engine did not give a usable answer."""


class PolicyUnreachable(PolicyError):
    """Nobody answered at the engine's address, or the connection broke before the answer was complete."""


class PolicyOverloaded(PolicyError):
    """The engine takes no work now; ask again later or elsewhere."""


class PolicyTooSlow(PolicyError):
    """A generation did not end in time; the engine may be well, and the generation too long for the limit."""


class PolicyRefused(PolicyError):
    """The engine understood the request and will not do it; the same request fails again."""


class ContextOverflow(PolicyRefused):
    """The prompt leaves no room for a token in the model's context: end the episode as truncated."""


class ModelPathMissing(PolicyRefused):
    """The engine finds no weights in the directory it was told to load."""


class BadReply(PolicyError):
    """The engine's answer cannot be trained on."""


class WrongWeights(PolicyError):
    """An engine has loaded a version, and says to its canary what other weights would say."""


class Weights(NamedTuple):
    """Which weights an engine has."""

    version: int = 0
    """Their number; 0 for those that nobody numbered."""
    run: str = ""
    """The run whose trainer made and numbered them; empty if they were put in place for none."""


UNKNOWN = Weights(version=-1)
"""In place while weights are exchanged: no task may be sampled by them."""


class Need(NamedTuple):
    """Which weights may sample a task."""

    min_version: int = 0
    """The lowest version."""
    weights_of: str | None = None
    """The run whose they are; anybody's if none."""

    def suits(self, weights: Weights) -> bool:
        """Tell whether these may; those that an engine was started with are no run's."""
        return weights.version >= self.min_version and self.weights_of in {None, weights.run}

    def __str__(self) -> str:
        """Name it for a person."""
        of_run = "" if self.weights_of is None else f" of run {self.weights_of}"
        return f"policy version >= {self.min_version}{of_run}"


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Sampled tokens [start, stop) of one generation drawn by one version of the weights."""

    start: int
    """Index of the first token among the sampled ones."""
    stop: int
    """Index after the last."""
    version: int
    """Version of the weights."""
    run: str = ""
    """Their run, as in `Weights`."""

    @property
    def weights(self) -> Weights:
        """What sampled them."""
        return Weights(self.version, self.run)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One answer of the policy; construction checks the promises of this module."""

    token_ids: TokenIds
    """The sampled ids, int32, shape (n,)."""
    logprobs: LogProbs
    """Log-prob of each at sampling, float32, shape (n,)."""
    finish_reason: FinishReason
    """Why it ended."""
    versions: tuple[VersionSpan, ...]
    """Which weights sampled which tokens; covers [0, n) in order."""

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if count == 0 and self.finish_reason != "abort":
            raise BadReply(f"the engine ended with {self.finish_reason!r} and sampled nothing; check its log")
        if len(self.logprobs) != count:
            raise BadReply(f"{count} ids came with {len(self.logprobs)} log-probs; ask for log-probs of sampled tokens")
        if not np.isfinite(self.logprobs).all():
            raise BadReply("a log-prob is not finite: the weights are broken or the sampler drew a masked token")
        if count and int(self.token_ids.min()) < 0:
            raise BadReply(f"token id {int(self.token_ids.min())} is negative")
        position = 0
        for span in self.versions:
            if span.start != position or span.stop <= span.start:
                raise BadReply(f"version span [{span.start}, {span.stop}) does not continue at {position}")
            if span.version < 0:
                raise BadReply("tokens were sampled while the weights were exchanged: a load did not end well")
            position = span.stop
        if position != count:
            raise BadReply(f"version spans cover {position} of {count} ids; the engine must report weight versions")


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What an engine serves, for the checks before a run."""

    model: str
    """Name that requests carry."""
    tokenizer_digest: str
    """Digest of tokenizer and chat template (`model_digest.py`); empty when the engine's files cannot be read here."""
    max_model_len: int
    """Prompt and answer together, in tokens."""
    version: int
    """Version of the weights that would sample the next token."""
    run: str = ""
    """Their run, as in `Weights`."""
    dtype: str
    """Number format of the weights, such as `float32`."""
    logprobs_mode: str
    """Must be `processed_logprobs`."""
    scores_paused: bool = False
    """It answers `score` during a pause too; others wait for its end."""

    @property
    def weights(self) -> Weights:
        """What would sample the next token."""
        return Weights(self.version, self.run)


class PolicyClient(Protocol):
    """One engine, as stages and the weight synchronisation see it."""

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
        """Sample the continuation of a prompt.

        Args:
            token_ids: the whole prompt; engines find by themselves what they have computed before.
            sampling: how to draw.
            seed: decides the draw.
            request_id: names the generation in the engine's log.
            stop_token_ids: ids that end the answer and belong to it.
            max_tokens: most tokens of this answer, if fewer than `sampling.max_tokens`.

        Raises:
            PolicyError: one of the tree in this module.
        """
        ...

    async def score(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> LogProbs:
        """Return the log-prob of each id behind the first one, given those before it, at temperature 1; shape (n - 1,).

        By the weights in place, without any cached prefix.

        Raises:
            PolicyError: one of the tree in this module.
        """
        ...

    async def info(self) -> ModelInfo:
        """Say what is served now."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling until `resume`; our engine ends a pause by itself if nobody resumes, vLLM does not."""
        ...

    async def resume(self) -> None:
        """Sample on."""
        ...

    async def load(self, directory: Path, version: int, run: str = "") -> None:
        """Put the weights of a directory in place under a version of a run; the engine must be paused.

        Running generations keep their key-value cache and go on with the new weights; no later prompt reuses a
        prefix that older weights computed.
        """
        ...

    async def label(self, weights: Weights) -> None:
        """Say which weights are in place, where `load` was wrong about that; no task is sampled by `UNKNOWN` ones."""
        ...

    async def close(self) -> None:
        """Give up connections; the engine goes on."""
        ...


Connect = Callable[[str], PolicyClient]
"""Address of an engine -> its client."""


def token_limit(sampling: Sampling, max_tokens: int | None) -> int:
    """Return the most tokens of one answer, from the family's limit and the turn's."""
    limit = sampling.max_tokens if max_tokens is None else min(max_tokens, sampling.max_tokens)
    if limit < 1:
        raise PolicyRefused(f"asked for {limit} tokens; end the episode before its token budget is used up")
    return limit
