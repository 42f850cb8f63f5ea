"""The calls of an agent that sends its whole conversation each time, as the branches of one token record. No I/O.

    ask = branches.ask(call, now_ms)                -> what to sample, and from which prompt; it has a number
    answer = branches.take(ask, generation, ...)    -> what to tell the agent; now it is recorded
    branches.give_up(ask.number)                    the number is free again, unless it is recorded

A branch is a conversation up to an answer of ours, and the tokens of its segment. A call whose messages are those of a
branch and more goes on with it: only what is new is encoded (`conversation.py`), and what was sampled never is.
Any other call begins a branch whose whole prompt is at mask 0: another system prompt, a history that the agent has
rewritten or cut, other tools, a point from which somebody has gone on already. So sub-agents are segments of their own,
and nothing that was sampled is lost or recorded twice.

Any number of calls may be asked and not yet answered, and answers may come in any order. Asking changes nothing: if the
branch has gone on meanwhile, the answer begins a segment, with the prompt that it was really sampled from. What is
given up leaves no trace but its number, which the next call gets, and with it the same draw.

An answer is recorded as it was sampled and told as the API wants it: without stop texts, with its tool calls apart. How
the one is found by the other is known here; how JSON looks, and what an engine is, is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from infra.errors import ConfigError, Failure
from infra.inference.base import Generation, ModelInfo
from infra.inference.ends import shortened
from schemas.identity import sampling_seed
from schemas.messages import Task
from schemas.outcome import Boundary, FailureKind, StopReason
from schemas.transcript import TokenIds, Transcript
from stages.run.api_error import LimitReached, malformed
from stages.run.chat import ChatCall, Said
from stages.run.conversation import Conversation, as_message
from stages.run.render import Renderer
from stages.run.segment import Sampled, Segment, joined
from stages.run.tool_calls import Reading, read, write

OF_EPISODE = frozenset({StopReason.TURNS, StopReason.TOKENS, StopReason.REPETITION})
"""Limits after which an episode can sample nothing more; another conversation may still fit into the context."""

ACTION_CHARS = 200
"""Longest action that a turn tells of, characters."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """What to sample for one call."""

    number: int
    """Of the call in its episode; the answer's tool calls are named by it."""
    prompt: TokenIds
    """All tokens of its segment so far, shape (T,), int32."""
    max_tokens: int
    """Most tokens of the answer."""
    seed: int
    """Decides the draw."""
    call: ChatCall
    """What was asked for."""
    began_ms: int
    """When, milliseconds since the epoch."""
    conversation: Conversation
    """As it is once the answer is there."""
    branch: _Branch | None
    """What it goes on with; a new branch if none."""
    extends: int
    """So many tokens of the prompt are the branch's segment; 0 begins a segment."""
    turns: int
    """Turns of the branch when this was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an agent is told."""

    number: int
    """Of the call."""
    said: Reading
    """Text and tool calls."""
    cut: bool
    """A limit on tokens, or a loop, ended it."""
    prompt_tokens: int
    """Tokens of the prompt."""
    sampled_tokens: int
    """Tokens of the answer."""


@dataclass(slots=True)
class _Branch:
    """A conversation up to an answer."""

    messages: tuple[Said, ...]
    tools: tuple[dict[str, Any], ...]
    conversation: Conversation
    text: str
    """The last answer, as it was sampled."""
    segment: Segment
    turns: int = 1
    """Answers so far, over all its segments."""


class Branches:
    """All conversations of one episode.

    Attributes:
        limit: the limit on the policy that the last calls met, if they met one.
    """

    def __init__(self, task: Task, renderer: Renderer, engine: ModelInfo) -> None:
        """Begin without a call.

        Args:
            task: with the limits of the episode.
            renderer: tokenizer and template.
            engine: bounds the context, too.
        """
        self.limit: StopReason | None = None
        self._task = task
        self._renderer = renderer
        self._context = min(renderer.context, engine.max_model_len or renderer.context)
        self._branches: list[_Branch] = []
        self._segments: list[Segment] = []
        self._texts: dict[Said, str] = {}
        """An answer as the agent has it -> as it was sampled."""
        self._running: set[int] = set()
        self._recorded: set[int] = set()
        self._sampled = 0

    @property
    def exhausted(self) -> bool:
        """Tell whether this episode can sample nothing more."""
        return self.limit in OF_EPISODE

    @property
    def empty(self) -> bool:
        """Tell whether nothing was recorded."""
        return not self._segments

    def _free_number(self) -> int:
        """Return a number that no call has. Raises LimitReached if there is none."""
        used = self._running | self._recorded
        if not self.exhausted and len(used) >= self._task.horizon:
            self.limit = StopReason.TURNS
        if self.exhausted:
            raise self._reached()
        return next(number for number in range(len(used) + 1) if number not in used)

    def give_up(self, number: int) -> None:
        """Forget a call unless it is recorded; another one may be made in its place."""
        self._running.discard(number)
        if self.limit is StopReason.TURNS and len(self._running | self._recorded) < self._task.horizon:
            self.limit = None

    def ask(self, call: ChatCall, now_ms: int) -> Ask:
        """Return what to sample for a call, which has a number from then on.

        Raises:
            LimitReached: there is no room for an answer.
            ApiError: the chat template cannot show this conversation.
        """
        number = self._free_number()
        self._require_a_chance(call)
        branch = self._continued(call)
        try:
            conversation, prompt, extends = self._prompt(call, branch)
        except ConfigError as error:
            raise malformed("messages", str(error)) from error
        room, budget = self._context - len(prompt), self._task.max_sampled_tokens - self._sampled
        if room < 1:
            self.limit = self.limit if self.exhausted else StopReason.CONTEXT
            raise _context_reached(len(prompt), self._context)
        if budget < 1:
            self.limit = StopReason.TOKENS
            raise self._reached()
        self._running.add(number)
        bounds = [self._task.sampling.max_tokens, room, budget, *([call.max_tokens] if call.max_tokens else [])]
        return Ask(
            number=number,
            prompt=prompt,
            max_tokens=min(bounds),
            seed=sampling_seed(self._task.seed, self._task.sample, number),
            call=call,
            began_ms=now_ms,
            conversation=conversation,
            branch=branch,
            extends=extends,
            turns=branch.turns if branch else 0,
        )

    def _require_a_chance(self, call: ChatCall) -> None:
        """Raise LimitReached for what cannot fit, before it is rendered: that takes time, by its size."""
        size = sum(len(message.content.encode()) for message in call.messages) + len(msgspec.json.encode(call.tools))
        least = max(len(call.messages), size // self._renderer.longest)
        if least >= self._context:
            self.limit = self.limit if self.exhausted else StopReason.CONTEXT
            raise _context_reached(least, self._context)

    def take(self, ask: Ask, generation: Generation, engine: ModelInfo, now_ms: int) -> Answer:
        """Record an engine's answer and return what the agent is told.

        Raises:
            LimitReached: other calls have used up the tokens of the episode meanwhile; nothing is recorded.
            Failure: the engine withdrew the generation.
        """
        if generation.finish_reason == "abort":
            raise Failure(FailureKind.ENGINE, Boundary.POLICY, "the engine withdrew the generation")
        left = self._task.max_sampled_tokens - self._sampled
        if left < 1:
            self.limit = StopReason.TOKENS
            raise self._reached()
        answer = self._at_stop(generation, ask.call.stop)
        if len(answer.token_ids) > left:
            answer = shortened(answer, left, "length")
        text = self._renderer.text(answer.token_ids)
        said = self._read(text, ask)
        self._record(ask, answer, engine, text, said, now_ms)
        self._note_limit(answer, len(ask.prompt) + len(answer.token_ids))
        return Answer(
            number=ask.number,
            said=said,
            cut=answer.finish_reason in {"length", "repetition"},
            prompt_tokens=len(ask.prompt),
            sampled_tokens=len(answer.token_ids),
        )

    def transcript(self) -> Transcript:
        """Return the token record; there must be an answer in it."""
        return joined(self._segments)

    # Which branch, and what prompt.

    def _continued(self, call: ChatCall) -> _Branch | None:
        """Return the branch that a call goes on with: the longest, if there are several."""
        fit = [
            branch
            for branch in self._branches
            if len(branch.messages) < len(call.messages)
            and call.messages[: len(branch.messages)] == branch.messages
            and branch.tools == call.tools
        ]
        return max(fit, key=lambda branch: len(branch.messages), default=None)

    def _prompt(self, call: ChatCall, branch: _Branch | None) -> tuple[Conversation, TokenIds, int]:
        """Return the conversation, the prompt, and how many tokens of it are the branch's segment."""
        if branch is not None:
            conversation = branch.conversation.copy()
            after = self._shown(call.messages[len(branch.messages) :])
            behind = conversation.followed(branch.text, after, last=branch.segment.last)
            if behind.rewritten:
                return conversation, behind.ids, 0
            if len(behind.ids):
                return conversation, np.concatenate([branch.segment.tokens, behind.ids]), len(branch.segment)
        tools = [self._as_text(tool) for tool in call.tools]
        conversation = Conversation(self._renderer, self._shown(call.messages), tools)
        return conversation, conversation.opening(), 0

    def _shown(self, messages: Sequence[Said]) -> list[dict[str, Any]]:
        """Return messages as the template gets them: answers of ours as they were sampled, and all else as text.

        No agent means a control token by what looks like one, not even in its system prompt: it may have read it.
        """
        found: list[dict[str, Any]] = []
        for message in messages:
            content = message.content  # of a user or a tool: the conversation knows that it is text
            if message.role == "assistant":
                ours = self._texts.get(message)
                content = self._renderer.as_text(write(content, message.calls)) if ours is None else ours
            elif message.role == "system":
                content = self._renderer.as_text(content)
            named = {"name": self._renderer.as_text(message.name)} if message.name else {}
            found.append({**as_message(message.role, content), **named})
        return found

    def _as_text(self, value: Any) -> Any:
        """Return a tool's schema with all its texts as text."""
        match value:
            case str():
                return self._renderer.as_text(value)
            case list():
                return [self._as_text(part) for part in value]
            case dict():
                return {self._renderer.as_text(name): self._as_text(part) for name, part in value.items()}
        return value

    # What was answered.

    def _at_stop(self, answer: Generation, stops: Sequence[str]) -> Generation:
        """Return an answer up to the token with which the first stop text is complete.

        That is a rule of the tokens sampled so far alone, so what stands before has the distribution it was drawn from.
        """
        if not stops:
            return answer
        text = self._renderer.text(answer.token_ids)
        present = [stop for stop in stops if stop in text]
        if not present:
            return answer
        low, high = 1, len(answer.token_ids)
        while low < high:
            middle = (low + high) // 2
            so_far = self._renderer.display(answer.token_ids[:middle])
            low, high = (low, middle) if any(stop in so_far for stop in present) else (middle + 1, high)
        return shortened(answer, low, "stop_sequence")

    def _read(self, text: str, ask: Ask) -> Reading:
        ends = [text.find(stop) for stop in ask.call.stop if stop in text]
        told = text[: min(ends)] if ends else text
        return read(told, f"call_{ask.number}") if ask.call.tools else Reading(content=told, calls=())

    def _record(self, ask: Ask, answer: Generation, engine: ModelInfo, text: str, said: Reading, now_ms: int) -> None:
        message = Said("assistant", said.content.strip(), said.calls)
        self._texts[message] = text
        branch = ask.branch
        if branch is None or branch.turns != ask.turns:
            # New, or somebody went on from the same point meanwhile: a branch of its own.
            branch = _Branch((), ask.call.tools, ask.conversation, "", Segment(), turns=0)
            self._branches.append(branch)
        elif ask.extends:
            branch.segment.went_on(ask.began_ms)
        else:
            branch.segment = Segment()
        segment = branch.segment
        if not len(segment):
            self._segments.append(segment)
        action = ", ".join(call.name for call in said.calls) or "message"
        told = Sampled(valid=said.readable, action=action[:ACTION_CHARS], began_ms=ask.began_ms, now_ms=now_ms)
        segment.add(ask.prompt[len(segment) :], answer, engine, self._task, told)
        branch.messages, branch.text = (*ask.call.messages, message), text
        branch.conversation, branch.turns = ask.conversation, branch.turns + 1
        self._sampled += len(answer.token_ids)
        self._recorded.add(ask.number)
        self._running.discard(ask.number)

    def _note_limit(self, answer: Generation, tokens: int) -> None:
        """Note which limit of the episode ended an answer; one that none ended shows that there is room again."""
        if self.exhausted:
            return
        self.limit = None
        if answer.finish_reason == "repetition":
            self.limit = StopReason.REPETITION
        elif answer.finish_reason == "length" and self._sampled >= self._task.max_sampled_tokens:
            self.limit = StopReason.TOKENS
        elif answer.finish_reason == "length" and tokens >= self._context:
            self.limit = StopReason.CONTEXT

    def _reached(self) -> LimitReached:
        task, limit = self._task, self.limit
        assert limit is not None, "asked only where there is one"
        what = {
            StopReason.TURNS: f"{task.horizon} calls were made, which is the horizon",
            StopReason.TOKENS: f"{task.max_sampled_tokens} tokens were sampled, which is the budget",
            StopReason.REPETITION: "an answer repeated itself",
        }
        return LimitReached(limit, f"this episode gets no more answers: {what[limit]}", code=f"limit_{limit.value}")


def _context_reached(tokens: int, context: int) -> LimitReached:
    message = f"the conversation has at least {tokens} tokens and the model's context is {context}: no answer fits"
    return LimitReached(StopReason.CONTEXT, message, code="context_length_exceeded")
