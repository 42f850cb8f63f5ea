"""A conversation turned into prompts, each of which extends all tokens before it, or says that it cannot.

The template renders the conversation with a mark in place of each answer that the policy gave. As long as what it
renders begins with what it had rendered, what follows the last mark is the glue to the next prompt: end of turn,
observations, tool results, generation prompt. Only that is encoded; what was sampled is never encoded again.

Some templates rewrite what was said: they leave the thoughts out of earlier turns, or the empty thoughts that they had
begun the answer with. Then the next prompt is what the template makes of the whole conversation, from its beginning: a
new segment, in which earlier answers are part of the prompt. White space around an answer, and around the thoughts in
it, is the policy's own and no rewriting, whatever a template would have put there.

What looks like a control token in a user's turn or a tool's result is text: a page that an agent reads must not be able
to end its turn and to speak as the system.

No ids of answers are known here, no engine and no environment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from schemas.transcript import TokenIds
from stages.run.render import Messages, Renderer

_ANSWER, _THOUGHT = "\u2063answer\u2063", "\u2063thought\u2063"
"""Stand for an answer, and for the thoughts in it, while the template renders; no observation holds the separators."""

TRUSTED = {"system", "assistant"}
"""Roles whose control tokens are meant as such: the family wrote the one, the policy sampled the other."""

_THINKING = re.compile(r"(?P<open>\s*<think>)?(?P<thought>.*)(?P<close></think>\s*)(?P<rest>.*)", re.DOTALL)
"""An answer with thoughts; where the generation prompt has opened them it begins inside."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What comes behind an answer."""

    ids: TokenIds
    """Behind all tokens before it, shape (T,), int32; the whole prompt if the history was rewritten."""
    rewritten: bool
    """A new segment begins with it."""


class Conversation:
    """One conversation as the policy of one model sees it."""

    def __init__(self, renderer: Renderer, messages: Messages, tools: Messages = ()) -> None:
        """Begin with the messages before the first answer.

        Args:
            renderer: tokenizer and template.
            messages: `role` and `content` each.
            tools: tool schemas for the template.
        """
        self._renderer = renderer
        self._tools = tools
        self._said = [self._shown(message) for message in messages]
        self._marked = self._said
        """The same, with marks for the answers of this segment."""
        self._rendered = ""
        """The last prompt, with marks."""

    def copy(self) -> Conversation:
        """Return one that goes on by itself from where this one is."""
        return copy(self)  # its lists are replaced, never changed

    def opening(self) -> TokenIds:
        """Return the ids of the first prompt, shape (T,), int32. Raises ConfigError if the template fails."""
        self._rendered = self._renderer.render(self._said, self._tools)
        return self._renderer.encode(self._rendered)

    def followed(self, answer: str, after: Messages, *, last: int) -> Prompt:
        """Return what leads from an answer to the next one.

        Args:
            answer: what the policy said.
            after: the messages behind it, such as observations or several tool results.
            last: the id that the answer ends with.

        Raises:
            ConfigError: the template fails.
        """
        said, marks = _marked(answer)
        behind = [self._shown(message) for message in after]
        self._said = [*self._said, as_message("assistant", answer), *behind]
        self._marked = [*self._marked, as_message("assistant", said), *behind]
        rendered = self._renderer.render(self._marked, self._tools)
        kept = marks.match(rendered, len(self._rendered)) if rendered.startswith(self._rendered) else None
        if kept is not None:
            self._rendered = rendered
            return Prompt(self._renderer.glue(rendered[kept.end() :], last), rewritten=False)
        self._marked = self._said
        return Prompt(self.opening(), rewritten=True)

    def _shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message as the template gets it: what others wrote ends no turn and begins none."""
        content = message.get("content")
        if message["role"] in TRUSTED or not isinstance(content, str):
            return message
        return {**message, "content": self._renderer.as_text(content)}


def _marked(answer: str) -> tuple[str, re.Pattern[str]]:
    """Return an answer with marks in place of what was said, and how a template shows that if it keeps all of it."""
    thinking = _THINKING.fullmatch(answer)
    if thinking is None:
        parts = ["", "", "", answer]
    else:
        parts = [thinking["open"] or "", thinking["thought"], thinking["close"], thinking["rest"]]
    # A template may treat what is empty in a way of its own, so that stays empty.
    marked = [
        mark if mark and part.strip() else part for part, mark in zip(parts, ["", _THOUGHT, "", _ANSWER], strict=True)
    ]
    return "".join(marked), _in_order([part.strip() for part in marked if part.strip()])


def _in_order(parts: Sequence[str]) -> re.Pattern[str]:
    return re.compile(r"\s*" + r"\s*".join(map(re.escape, parts)))


def as_message(role: str, content: str) -> dict[str, Any]:
    """Return one message of a conversation."""
    return {"role": role, "content": content}
