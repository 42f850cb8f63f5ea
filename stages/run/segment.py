"""The tokens of one prefix while it grows, and several of them as one transcript.

Indices inside a segment count from its own start, so that segments may grow in any order; `joined` puts one behind the
other and moves the indices. No text, no messages, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from infra.inference.base import Generation, ModelInfo
from schemas.messages import Task
from schemas.transcript import LogProbs, SampledSpan, TokenIds, Transcript, Turn, pack_logprobs, pack_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What is told of a turn beside its tokens."""

    valid: bool
    """The answer can be read."""
    action: str
    """What it does, for a person."""
    began_ms: int
    """When it was asked for, milliseconds since the epoch."""
    now_ms: int
    """When it was there."""


@dataclass(slots=True)
class Segment:
    """A prompt, an answer, what follows it, an answer ..."""

    ids: list[TokenIds] = field(default_factory=list)
    """Prompts and answers in turn, shape (t,), int32 each."""
    logprobs: list[LogProbs] = field(default_factory=list)
    """Of the same shapes; 0 for prompts."""
    mask: bytearray = field(default_factory=bytearray)
    """1 for what was sampled."""
    spans: list[SampledSpan] = field(default_factory=list)
    """Versions and parameters."""
    turns: list[Turn] = field(default_factory=list)
    """One for each answer."""

    def __len__(self) -> int:
        """Return the tokens so far."""
        return len(self.mask)

    @property
    def tokens(self) -> TokenIds:
        """All ids, shape (T,), int32."""
        return np.concatenate(self.ids) if self.ids else np.zeros(0, np.int32)

    @property
    def last(self) -> int:
        """The last id."""
        return int(self.ids[-1][-1])

    def add(self, prompt: TokenIds, answer: Generation, engine: ModelInfo, task: Task, told: Sampled) -> None:
        """Append a turn: what led to the answer, shape (t,) and at least one id, and the answer."""
        start, sampled = len(self), len(self) + len(prompt)
        self.spans += spans_of(answer, engine, task, offset=sampled)
        self.ids += [prompt, answer.token_ids]
        self.logprobs += [np.zeros(len(prompt), np.float32), answer.logprobs]
        self.mask += b"\x00" * len(prompt) + b"\x01" * len(answer.token_ids)
        self.turns.append(
            Turn(
                start=start,
                sampled=sampled,
                stop=len(self),
                valid=told.valid,
                action=told.action,
                finish=answer.finish_reason,
                began_ms=told.began_ms,
                generated_ms=told.now_ms,
                ended_ms=told.now_ms,
            )
        )

    def went_on(self, now_ms: int) -> None:
        """Note when what the last answer led to was known."""
        self.turns[-1] = msgspec.structs.replace(self.turns[-1], ended_ms=now_ms)


def spans_of(answer: Generation, engine: ModelInfo, task: Task, *, offset: int) -> list[SampledSpan]:
    """Return the spans of an answer whose first token has the index `offset`."""
    expected = task.weights_of or task.run
    return [
        SampledSpan(
            start=offset + span.start,
            stop=offset + span.stop,
            version=span.version,
            sampling=task.sampling,
            dtype=engine.dtype,
            logprobs_mode=engine.logprobs_mode,
            weights_of="" if span.run in {"", expected} else span.run,
        )
        for span in answer.versions
    ]


def joined(segments: Sequence[Segment]) -> Transcript:
    """Return segments as one token record, one behind the other; each has a turn."""
    starts = np.cumsum([0, *(len(segment) for segment in segments)]).tolist()[:-1]
    return Transcript(
        tokens=pack_tokens(np.concatenate([segment.tokens for segment in segments])),
        mask=b"".join(segment.mask for segment in segments),
        logprobs=pack_logprobs(np.concatenate([array for segment in segments for array in segment.logprobs])),
        spans=tuple(
            msgspec.structs.replace(span, start=start + span.start, stop=start + span.stop)
            for segment, start in zip(segments, starts, strict=True)
            for span in segment.spans
        ),
        turns=tuple(
            msgspec.structs.replace(
                turn, start=start + turn.start, sampled=start + turn.sampled, stop=start + turn.stop
            )
            for segment, start in zip(segments, starts, strict=True)
            for turn in segment.turns
        ),
        segments=tuple(starts),
    )
