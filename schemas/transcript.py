"""The token record of one episode, and what must hold for it.

Invariants, checked at construction sites by `check` before anything is published:

- `tokens`, `mask` and `logprobs` have one entry per token;
- a mask of 1 means that the policy sampled the token; at mask 0 the log-prob is exactly 0.0, at mask 1 a finite number
  that is not above 0 (by more than an engine rounds);
- the sampled spans cover the tokens of mask 1, no more and no less, each with one version and one set of sampling
  parameters;
- turns follow each other without a gap inside a segment: the prompt of a turn is all tokens of its segment before
  its first sampled token, so each turn extends the prefix of the one before.

A violation is an error with its cause; nothing is padded, shifted or re-encoded. Readers ask again: a completed sample
whose record breaks one ends as failed for all of them (`Trajectory.as_read`). On the wire the arrays are
little-endian: int32 ids, uint8 mask, float32 log-probs. This file does not know text, templates or tokenizers.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.message import Part

TokenIds = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]


class TranscriptError(ValueError):
    """A token record breaks one of its invariants."""


class Repetition(Part, frozen=True, kw_only=True):
    """When an answer counts as a loop: its last tokens are one pattern, again and again (vLLM's rule and names)."""

    max_pattern_size: int
    """Longest pattern looked for, tokens."""
    min_pattern_size: int = 1
    """Shortest, tokens; a run of one token is a repetition of any pattern of that token."""
    min_count: int = 4
    """How often the pattern stands there, one behind the other."""


class Sampling(Part, frozen=True, kw_only=True):
    """The distribution that tokens are drawn from, and where a turn ends."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus; 1 is off."""
    top_k: int = 0
    """Keeps the k likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Keeps tokens with at least this share of the likeliest one's probability; 0 is off."""
    max_tokens: int = 256
    """Most tokens sampled in one turn."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Each ends a turn once its ids were sampled one behind the other; they belong to the turn."""
    repetition: Repetition | None = None
    """An answer that loops is ended, and its episode with it; off unless given."""


SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_p": (math.ulp(0.0), 1.0),  # 0 would leave no token
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "max_tokens": (1, 2**31 - 1),
}
"""Field of the sampling parameters -> lowest and highest value."""

REPETITION_RANGES: dict[str, tuple[int, int]] = {
    "max_pattern_size": (1, 1024),  # each is looked for at every token
    "min_pattern_size": (1, 1024),
    "min_count": (2, 1024),
}
"""Field of a repetition -> lowest and highest value."""

STOP_SEQUENCES = 64
"""Most stop sequences: each is compared at every token."""

STOP_SEQUENCE_IDS = 256
"""Most ids of a stop sequence."""

LOWEST_TEMPERATURE = 1e-4
"""Lowest temperature above 0: logits that are divided by less overflow, and an engine may fail on all its requests."""

LATEST_VERSION = 2**53
"""Highest number of a version of the weights; every language can count so far."""

LOGPROB_SLACK = 1e-2
"""A log-prob may be so far above 0 and still be rounding: engines take the logarithm of sums in 16 bits."""


def sampling_flaw(sampling: Sampling) -> str | None:
    """Return which sampling parameter cannot be drawn with, and what it may be; None if all can."""
    for name, (low, high) in SAMPLING_RANGES.items():
        value = getattr(sampling, name)
        if not low <= value <= high:  # NaN is neither more nor less
            return f"sampling.{name} is {value}; it is {low:g} to {high:g}"
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        return f"sampling.temperature is {sampling.temperature}; it is 0, or at least {LOWEST_TEMPERATURE:g}"
    if len(sampling.stop_sequences) > STOP_SEQUENCES:
        return f"sampling.stop_sequences has {len(sampling.stop_sequences)} entries; it has at most {STOP_SEQUENCES}"
    for ids in sampling.stop_sequences:
        if not 1 <= len(ids) <= STOP_SEQUENCE_IDS or not all(0 <= token < 2**31 for token in ids):
            return f"sampling.stop_sequences has {str(ids)[:80]}; it is 1 to {STOP_SEQUENCE_IDS} token ids, each from 0"
    return None if sampling.repetition is None else _repetition_flaw(sampling.repetition)


def _repetition_flaw(repetition: Repetition) -> str | None:
    for name, (low, high) in REPETITION_RANGES.items():
        if not low <= getattr(repetition, name) <= high:
            return f"sampling.repetition.{name} is {getattr(repetition, name)}; it is {low} to {high}"
    if repetition.min_pattern_size > repetition.max_pattern_size:
        return (
            f"sampling.repetition.min_pattern_size is {repetition.min_pattern_size}, and max_pattern_size "
            f"{repetition.max_pattern_size}: no pattern is both"
        )
    return None


class SampledSpan(Part, frozen=True, kw_only=True):
    """Consecutive sampled tokens [start, stop) drawn by one version of the weights in one way."""

    start: int
    """Index of the first token in the transcript."""
    stop: int
    """Index after the last token."""
    version: int
    """Version of the weights that sampled them."""
    sampling: Sampling
    """Parameters they were drawn with."""
    dtype: str
    """Number format of the engine's weights."""
    logprobs_mode: str
    """`processed_logprobs`: of the distribution actually sampled."""
    weights_of: str = ""
    """Run whose weights `version` names, if they were another one's; empty: the run that the task names, or its own."""


class Turn(Part, frozen=True, kw_only=True):
    """One prompt extension and what the policy answered: tokens [start, stop)."""

    start: int
    """Index of the first token that this turn's prompt adds."""
    sampled: int
    """Index of the first sampled token."""
    stop: int
    """Index after the last sampled token."""
    valid: bool
    """The text parsed to an allowed action."""
    action: str
    """The action taken, or why there was none."""
    finish: str
    """Why the engine stopped: `stop`, `stop_sequence`, `length`, `repetition`."""
    began_ms: int
    """When the generation was asked for, milliseconds since the epoch."""
    generated_ms: int
    """When the generation was there."""
    ended_ms: int
    """When the environment had answered."""


class Transcript(Part, frozen=True, kw_only=True):
    """Everything an episode's model saw and said, token by token."""

    tokens: bytes
    """Token ids, int32 little-endian, T entries."""
    mask: bytes
    """1 where the policy sampled the token, uint8, T entries."""
    logprobs: bytes
    """Log-probability at sampling, float32 little-endian, T entries; 0.0 at mask 0."""
    spans: tuple[SampledSpan, ...]
    """Version and parameters of the sampled tokens, in order."""
    turns: tuple[Turn, ...]
    """The turns, in order."""
    segments: tuple[int, ...] = (0,)
    """Indices at which a new token prefix starts; one unless history was rewritten or forked."""

    @property
    def token_ids(self) -> TokenIds:
        """The ids, shape (T,), int32, read-only."""
        return np.frombuffer(self.tokens, dtype="<i4")

    @property
    def mask_array(self) -> Mask:
        """The mask, shape (T,), uint8, read-only."""
        return np.frombuffer(self.mask, dtype=np.uint8)

    @property
    def logprob_array(self) -> LogProbs:
        """The log-probs, shape (T,), float32, read-only."""
        return np.frombuffer(self.logprobs, dtype="<f4")

    @property
    def sampled_count(self) -> int:
        """Number of sampled tokens."""
        return self.mask.count(1)


def pack_tokens(ids: npt.ArrayLike) -> bytes:
    """Return ids as int32 little-endian bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def pack_logprobs(values: npt.ArrayLike) -> bytes:
    """Return log-probs as float32 little-endian bytes."""
    return np.asarray(values, dtype="<f4").tobytes()


def check(transcript: Transcript) -> None:
    """Raise TranscriptError if the record breaks an invariant of this module."""
    _check_lengths(transcript)
    _check_mask(transcript)
    _check_spans(transcript)
    _check_turns(transcript)


def _check_lengths(transcript: Transcript) -> None:
    sizes = {
        "tokens": len(transcript.tokens) / 4,
        "mask": float(len(transcript.mask)),
        "logprobs": len(transcript.logprobs) / 4,
    }
    if len(set(sizes.values())) != 1:
        raise TranscriptError(f"tokens, mask and logprobs differ in length: {sizes}")


def _check_mask(transcript: Transcript) -> None:
    mask, logprobs = transcript.mask_array, transcript.logprob_array
    if mask.size and int(mask.max()) > 1:
        raise TranscriptError(f"mask holds {int(mask.max())}; only 0 and 1 are allowed")
    low, high = (float(logprobs.min()), float(logprobs.max())) if logprobs.size else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):  # each is NaN if there is one
        raise TranscriptError("a log-prob is not a finite number")
    if high > LOGPROB_SLACK:
        raise TranscriptError(f"a log-prob is {high:g}: no probability is above 1")
    if np.any(logprobs[mask == 0]):
        raise TranscriptError("a token that was not sampled has a log-prob")
    if transcript.tokens and int(transcript.token_ids.min()) < 0:
        raise TranscriptError("a token id is negative")


def _check_spans(transcript: Transcript) -> None:
    covered = np.zeros(len(transcript.mask), dtype=np.uint8)
    position, sound = 0, None
    for span in transcript.spans:
        if not position <= span.start < span.stop <= len(covered):
            raise TranscriptError(f"span [{span.start}, {span.stop}) is empty, out of order or out of range")
        if not 0 <= span.version <= LATEST_VERSION:
            raise TranscriptError(f"span [{span.start}, {span.stop}) names version {span.version}")
        if span.sampling != sound:  # mostly all are alike
            wrong = sampling_flaw(span.sampling)
            if wrong is not None:
                raise TranscriptError(f"span [{span.start}, {span.stop}): {wrong}")
            sound = span.sampling
        covered[span.start : span.stop] = 1
        position = span.stop
    if covered.tobytes() != transcript.mask:
        raise TranscriptError("the spans do not cover exactly the sampled tokens")


def _check_turns(transcript: Transcript) -> None:
    starts = set(transcript.segments)
    if transcript.segments[:1] != (0,) or list(transcript.segments) != sorted(starts):
        raise TranscriptError(f"segments {transcript.segments} must rise from 0")
    position, answers = 0, bytearray(len(transcript.mask))
    for number, turn in enumerate(transcript.turns):
        if turn.start != position:
            raise TranscriptError(f"turn {number} starts at {turn.start}, not at {position}")
        if not turn.start < turn.sampled <= turn.stop <= len(transcript.mask):
            raise TranscriptError(f"turn {number} has no prompt or runs out of range")
        starts.discard(turn.start)
        answers[turn.sampled : turn.stop] = b"\x01" * (turn.stop - turn.sampled)
        position = turn.stop
    # Compared at once: readers ask this of every record, and a mask may have a hundred thousand entries.
    if answers != transcript.mask:
        raise TranscriptError(_unlike_turns(transcript, answers))
    if starts - {0}:
        raise TranscriptError(f"segments {sorted(starts)} do not start at a turn")


def _unlike_turns(transcript: Transcript, answers: bytearray) -> str:
    """Return where the mask says something else than the turns."""
    at = next(at for at, pair in enumerate(zip(transcript.mask, answers, strict=True)) if pair[0] != pair[1])
    for number, turn in enumerate(transcript.turns):
        if turn.start <= at < turn.stop:
            return f"turn {number}: the mask does not split prompt and answer at {turn.sampled}"
    return "tokens after the last turn are marked as sampled"


def as_builtins(transcript: Transcript) -> dict[str, Any]:
    """Return the transcript as plain lists and numbers, for display."""
    view: dict[str, Any] = msgspec.to_builtins(transcript, builtin_types=(bytes,))
    view["tokens"] = transcript.token_ids.tolist()
    view["mask"] = transcript.mask_array.tolist()
    view["logprobs"] = transcript.logprob_array.tolist()
    return view
