"""The JSON of vLLM's token-in, token-out protocol, as both our client and our local server speak it.

Field names and meanings are vLLM's (`/inference/v1/generate`, development endpoints for weight updates); fields that
neither side uses are left out, and a reader ignores fields it does not know. This file does no I/O.
"""

from __future__ import annotations

import msgspec

from infra.inference.base import Weights
from schemas.transcript import Repetition

GENERATE = "/inference/v1/generate"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
COLLECTIVE_RPC = "/collective_rpc"
UPDATE_WEIGHT_VERSION = "/update_weight_version"
WEIGHT_INFO = "/weight_info"
RESET_PREFIX_CACHE = "/reset_prefix_cache"
ABORT_REQUESTS = "/abort_requests"
HEALTH = "/health"
MODELS = "/v1/models"
SERVER_INFO = "/server_info"
LOAD = "/load"

DEFAULT_VERSION = "default"
"""The label of weights that nobody has labelled: those the engine was started with."""


class ExtraArgs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What vLLM carries and ignores, and our server does."""

    stop_sequences: list[list[int]] = []
    """Ids that end the answer where they stand one behind the other; finish_reason `stop_sequence`."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw, in vLLM's words."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 are off."""
    min_p: float = 0.0
    max_tokens: int = 16
    prompt_logprobs: int | None = None
    """The same for the ids of the prompt, by what the model says at temperature 1."""
    logprobs: int | None = None
    """Number of alternatives beside the sampled token; 0 asks for the sampled one's log-prob alone."""
    seed: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    """Our stop ids are complete; the engine's own end-of-text id must not add to them."""
    detokenize: bool = True
    """Text is not wanted."""
    n: int = 1
    stop: list[str] | str | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repetition_detection: Repetition | None = None
    """Which answers are loops; they end with finish_reason `repetition` (vLLM 0.17 and later)."""
    extra_args: ExtraArgs | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt."""

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str = ""
    model: str | None = None
    cache_salt: str | None = None
    """Prompts of different salt share no cached prefix."""
    stream: bool = False


class LogProb(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampled token of one position; older vLLM names it `token_id:N`, newer gives `token_id`."""

    logprob: float
    token_id: int | None = None
    token: str | None = None

    @property
    def id(self) -> int | None:
        """The token's id, however it was written; None if it is text."""
        if self.token_id is not None or self.token is None:
            return self.token_id
        name, _, number = self.token.partition(":")
        return int(number) if name == "token_id" and number.isdecimal() else None


class LogProbs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per sampled token."""

    content: list[LogProb] | None = None


class WeightVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens [start, end) drawn by weights of this label."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    finish_reason: str | None
    token_ids: list[int] | None = None
    logprobs: LogProbs | None = None
    weight_versions: list[WeightVersion] | None = None


class PromptLogProb(msgspec.Struct, frozen=True, kw_only=True):
    """What the model says of an id of the prompt."""

    logprob: float


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answers to one prompt."""

    request_id: str
    choices: list[Choice]
    prompt_logprobs: list[dict[str, PromptLogProb] | None] | None = None
    """By id, for each place of the prompt; nothing is said of the first."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What is served; the last four fields are ours, and empty from vLLM."""

    id: str
    max_model_len: int | None = None
    root: str | None = None
    """Directory the engine read the model from."""
    tokenizer_digest: str = ""
    dtype: str = ""
    logprobs_mode: str = ""
    scores_paused: bool = False
    """Prompts are scored during a pause too."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All that is served."""

    data: list[ModelCard]


class WeightInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Label of the weights in place."""

    weight_version: str


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """Whether sampling is stopped."""

    is_paused: bool


class NewVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Label to give to the weights in place."""

    new_version: str


class ReloadWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of vLLM's `reload_weights`."""

    weights_path: str


class CollectiveRpc(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a method on all workers of the engine."""

    method: str
    kwargs: ReloadWeights


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Generations to end; none given means all."""

    request_ids: list[str] | None = None


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    message: str
    type: str = ""
    code: int | str | None = None


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """Body of any reply that is not 2xx."""

    error: ErrorInfo


def label(weights: Weights) -> str:
    """Return the label of weights, as vLLM carries it: `12@my-run`, or `12` if they are no run's."""
    return f"{weights.version}@{weights.run}" if weights.run else str(weights.version)


def salt(weights: Weights) -> str:
    """Return what tells prefixes of these weights apart; vLLM refuses `@` and more than 128 characters there."""
    return f"{weights.version}.{weights.run}" if weights.run else str(weights.version)


def labelled(text: str) -> Weights:
    """Return the weights that have this label.

    Raises:
        ValueError: the label is something else.
    """
    number, _, run = text.partition("@")
    return Weights() if text == DEFAULT_VERSION else Weights(int(number), run)
