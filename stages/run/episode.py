"""The turns of one episode, decided without I/O: tokens and observations in, moves out.

    move = machine.start(now_ms)
    Ask  -> sample a continuation of machine.prompt     -> move = machine.generated(...)
    Act  -> carry the action out in the environment     -> move = machine.observed(...)
    Stop -> the episode is over                         -> machine.transcript()

The machine owns the token record and keeps its invariants: a prompt extends all tokens before it, or, where the
template rewrites the history (`conversation.py`), begins a new segment with all of it; sampled ids are taken as they
came, and limits on the policy (turns, sampled tokens, context, an answer that loops) stop the episode as truncated. It
knows no engine, no environment, no clock and no task family beyond its `act`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.errors import Failure, boundary
from infra.inference.base import Generation, ModelInfo
from schemas.identity import sampling_seed
from schemas.messages import Episode
from schemas.outcome import Boundary, FailureKind, StopReason
from schemas.transcript import SampledSpan, TokenIds, Transcript, Turn, pack_logprobs, pack_tokens
from stages.handlers.base import Action, Invalid
from stages.run.conversation import Conversation, Prompt, as_message
from stages.run.render import Renderer
from stages.run.segment import spans_of


@dataclass(frozen=True, slots=True)
class Ask:
    """Sample a continuation of the prompt."""

    max_tokens: int
    """Most tokens of the answer."""
    seed: int
    """Decides the draw."""


@dataclass(frozen=True, slots=True)
class Act:
    """Carry an action out."""

    action: Action


@dataclass(frozen=True, slots=True)
class Stop:
    """The episode is over."""

    reason: StopReason


Move = Ask | Act | Stop


@dataclass(slots=True)
class _OpenTurn:
    start: int
    sampled: int
    began_ms: int
    stop: int = 0
    finish: str = ""
    generated_ms: int = 0


class EpisodeMachine:
    """One episode in progress."""

    def __init__(
        self,
        episode: Episode,
        renderer: Renderer,
        engine: ModelInfo,
        act: Callable[[str], Action | Invalid],
        *,
        invalid_ends: bool,
    ) -> None:
        self._task = episode.task
        self._conversation = Conversation(renderer, episode.messages, episode.tools)
        self._renderer = renderer
        self._act = act
        self._invalid_ends = invalid_ends
        self._context = min(renderer.context, engine.max_model_len or renderer.context)
        self._tokens: list[TokenIds] = []
        self._logprobs: list[Any] = []
        self._mask = bytearray()
        self._segments = [0]
        self._spans: list[SampledSpan] = []
        self._turns: list[Turn] = []
        self._turn: _OpenTurn | None = None
        self._said = ""
        """The last answer."""

    @property
    def prompt(self) -> TokenIds:
        """All tokens of the segment so far, shape (T,), int32."""
        return np.concatenate(self._tokens)[self._segments[-1] :]

    @property
    def turn(self) -> int:
        """Number of the turn in progress, from 0."""
        return len(self._turns)

    def start(self, now_ms: int) -> Move:
        """Return the first move."""
        with boundary(Boundary.TRANSCRIPT, FailureKind.INVALID_TASK):
            opening = self._conversation.opening()
        return self._ask(Prompt(opening, rewritten=False), now_ms)

    def generated(self, answer: Generation, engine: ModelInfo, now_ms: int) -> Move:
        """Take an engine's answer to the last Ask; turns may be answered by several."""
        turn = self._open_turn()
        if answer.finish_reason == "abort":
            raise Failure(FailureKind.ENGINE, Boundary.POLICY, "the engine withdrew the generation")
        self._record(answer, engine)
        turn.stop, turn.finish, turn.generated_ms = len(self._mask), answer.finish_reason, now_ms
        if answer.finish_reason == "repetition":
            self._close_turn(now_ms, valid=False, action="the answer repeats itself")
            return Stop(StopReason.REPETITION)
        self._said = self._renderer.text(answer.token_ids)
        action = self._act(self._said)
        if isinstance(action, Action):
            return Act(action)
        self._close_turn(now_ms, valid=False, action=action.reason)
        if self._invalid_ends:
            return Stop(self._limit_reached() or StopReason.INVALID_ACTION)
        return self._next(action.reason, now_ms)

    def observed(self, action: Action, observation: str, now_ms: int, *, done: bool) -> Move:
        """Take the environment's answer to the last Act."""
        self._close_turn(now_ms, valid=True, action=action.name)
        if done:
            return Stop(StopReason.DONE)
        return self._next(observation, now_ms)

    def transcript(self) -> Transcript:
        """Return the token record."""
        return Transcript(
            tokens=pack_tokens(np.concatenate(self._tokens)),
            mask=bytes(self._mask),
            logprobs=pack_logprobs(np.concatenate(self._logprobs)),
            spans=tuple(self._spans),
            turns=tuple(self._turns),
            segments=tuple(self._segments),
        )

    def _next(self, observation: str, now_ms: int) -> Move:
        if len(self._turns) >= self._task.horizon:
            return Stop(StopReason.TURNS)
        reply = as_message("user", observation)
        with boundary(Boundary.TRANSCRIPT, FailureKind.INVALID_TASK):
            prompt = self._conversation.followed(self._said, [reply], last=int(self._tokens[-1][-1]))
        return self._ask(prompt, now_ms)

    def _ask(self, prompt: Prompt, now_ms: int) -> Move:
        start, extension = len(self._mask), prompt.ids
        segment = start if prompt.rewritten else self._segments[-1]
        room = self._context - (start - segment) - len(extension)
        budget = self._task.max_sampled_tokens - self._mask.count(1)
        if room < 1:
            return Stop(StopReason.CONTEXT) if self._turns else self._too_long(len(extension))
        if budget < 1:
            return Stop(StopReason.TOKENS)
        if prompt.rewritten:
            self._segments.append(start)
        self._append(extension, np.zeros(len(extension), np.float32), sampled=False)
        self._turn = _OpenTurn(start=start, sampled=len(self._mask), began_ms=now_ms)
        seed = sampling_seed(self._task.seed, self._task.sample, len(self._turns))
        return Ask(max_tokens=min(self._task.sampling.max_tokens, room, budget), seed=seed)

    def _limit_reached(self) -> StopReason | None:
        """Return the limit of the episode that cut the last answer, if one did: it could not be finished."""
        if self._turns[-1].finish != "length":
            return None
        if len(self._mask) - self._segments[-1] >= self._context:
            return StopReason.CONTEXT
        return StopReason.TOKENS if self._mask.count(1) >= self._task.max_sampled_tokens else None

    def _too_long(self, tokens: int) -> Move:
        raise Failure(
            FailureKind.INVALID_TASK,
            Boundary.TASK,
            f"the opening has {tokens} tokens and the model's context is {self._context}: no turn fits",
        )

    def _record(self, answer: Generation, engine: ModelInfo) -> None:
        self._spans += spans_of(answer, engine, self._task, offset=len(self._mask))
        self._append(answer.token_ids, answer.logprobs, sampled=True)

    def _append(self, ids: TokenIds, logprobs: Any, *, sampled: bool) -> None:
        self._tokens.append(ids)
        self._logprobs.append(logprobs)
        self._mask.extend((b"\x01" if sampled else b"\x00") * len(ids))

    def _close_turn(self, now_ms: int, *, valid: bool, action: str) -> None:
        turn = self._open_turn()
        self._turn = None
        self._turns.append(
            Turn(
                start=turn.start,
                sampled=turn.sampled,
                stop=turn.stop,
                valid=valid,
                action=action,
                finish=turn.finish,
                began_ms=turn.began_ms,
                generated_ms=turn.generated_ms,
                ended_ms=now_ms,
            )
        )

    def _open_turn(self) -> _OpenTurn:
        assert self._turn is not None, "an answer without a question"
        return self._turn
