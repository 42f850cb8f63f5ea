"""Reasoning: one question, one answer, over every reasoning-gym generator by name.

A payload names the generator: `{"generator": "chain_sum", "config": {...}, "seed": 7, "index": 0}`; without a seed the
task's decides, so siblings meet the same question and a retry meets it again. The answer is what stands between
`<answer>` and `</answer>` last; text without such a tag is malformed and ends the episode.

The environment scores with the generator's own scorer, because only it holds the generator's record of the question;
the verdict carries the score, and the answers given and expected for people and for later graders. A scorer that
raises at an answer but not at the expected one was broken by the policy's text, which scores 0; one that raises at
both is broken itself, which is a failure and no reward. It does not know models, tokens, processes or clocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

from infra.envhost.environment import StepResult
from schemas.messages import Rollout, Task
from stages.handlers.base import Action, Grade, Invalid, Opening
from stages.handlers.reasoning_answers import refusal
from stages.handlers.reasoning_puzzles import dataset, puzzle

PROMPT_VERSION: Final = "reasoning.v1"
"""Names the file of the system prompt; a changed prompt is a new file."""

PROMPT: Final = (resources.files(__package__) / "prompts" / f"{PROMPT_VERSION}.txt").read_text("utf-8").strip()
"""The system prompt."""

SUCCESS: Final = 0.99
"""A score from here on is a success: partial credit and the scorers' consolations are not."""

INDEX_MOST: Final = 1_000_000
"""Largest index: some generators build a list as long as it."""

FIELDS: Final = frozenset({"generator", "config", "seed", "index"})
"""What a payload may hold."""

ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
"""Where a text says its answer; the last match counts."""

FAULT_CHARS: Final = 500
"""Longest fault of a scorer that the verdict carries, characters."""


class Question:
    """One question waiting for its one answer: the environment of a task, living in the environment host.

    The data set is dropped between asking and scoring and made again: some hold megabytes, and a host holds many.
    """

    def __init__(self, generator: Any, config: Mapping[str, Any], seed: int, index: int) -> None:
        self._source = (generator, config, seed, index)
        self._puzzle = puzzle(generator, config, seed, index)
        self._answer: str | None = None
        self._score: float | None = None
        self._fault = ""

    def reset(self) -> str:
        """Forget the answer and ask again."""
        self._answer, self._score, self._fault = None, None, ""
        return self._puzzle.question

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take the answer and score it; there is no second one."""
        if self._answer is not None:
            raise ValueError("reasoning: the question was answered; reset it before another step")
        answer = str(action["arguments"]["answer"])
        self._score, self._fault = self._scored(answer)
        self._answer = answer
        return StepResult(observation="", done=True)

    def verdict(self) -> dict[str, Any]:
        """What grading needs: the score, none without an answer; the rest is for people."""
        generator, _, seed, index = self._source
        return {
            "generator": generator,
            "seed": seed,
            "index": index,
            "answer": self._answer,
            "expected": self._puzzle.expected,
            "score": self._score,
            "fault": self._fault,
        }

    def close(self) -> None:
        """Nothing to release: a question is plain memory."""

    def _scored(self, answer: str) -> tuple[float, str]:
        generator = self._puzzle.entry.get("metadata", {}).get("source_dataset", self._source[0])
        if fault := refusal(generator, answer):
            return 0.0, fault
        made, entry = dataset(*self._source), self._puzzle.entry
        try:
            score = float(made.score_answer(answer, entry))
        except Exception as error:  # noqa: BLE001 - a hundred scorers raise what they like; see the module's text
            # Only an answer that the scorer accepts shows that the text was at fault; where the generator gives none,
            # the empty one is all there is to try.
            made.score_answer(self._puzzle.expected or "", entry)
            return 0.0, f"{type(error).__name__}: {error}"[:FAULT_CHARS]
        if not math.isfinite(score):
            raise ValueError(f"reasoning: the scorer of {generator} returned {score} for {answer[:200]!r}")
        return min(max(score, 0.0), 1.0), ""


class Reasoning:
    """The handler of the family: how a question is put, where its answer stands, what it is worth."""

    family = "reasoning"
    """Name by which tasks ask for it."""
    prompt_version = PROMPT_VERSION
    """Version of its prompt."""
    invalid_ends = True
    """Text without an answer ends the episode."""

    def environment(self, payload: Mapping[str, Any], seed: int) -> Question:
        """The question that a task names. Bad payloads raise ValueError, which says what was found."""
        if unknown := sorted(set(payload) - FIELDS):
            raise ValueError(
                f"reasoning: unknown field {unknown[0]!r} in the payload; known: {', '.join(sorted(FIELDS))}"
            )
        config = payload.get("config", {})
        if not isinstance(config, Mapping):
            raise ValueError(f"reasoning: config must be a map, got {config!r}")  # noqa: TRY004 - a bad payload
        return Question(
            payload.get("generator", ""),
            config,
            _whole(payload, "seed", seed, 2**63 - 1),
            _whole(payload, "index", 0, INDEX_MOST),
        )

    def init(self, task: Task, observation: str) -> Opening:
        """The system prompt and the question."""
        return Opening(messages=({"role": "system", "content": PROMPT}, {"role": "user", "content": observation}))

    def act(self, text: str) -> Action | Invalid:
        """Read the last tagged answer."""
        found = ANSWER.findall(text)
        if not found:
            return Invalid(text=text, reason="expected the final answer between <answer> and </answer>")
        return Action(text=text, name="answer", arguments={"answer": found[-1].strip()})

    def grade(self, rollout: Rollout, verdict: Mapping[str, Any]) -> Grade:
        """The generator's score; no answer is worth nothing."""
        score = verdict["score"] or 0.0
        return Grade(components={"answer": score}, success=float(score >= SUCCESS))


def _whole(payload: Mapping[str, Any], name: str, default: int, most: int) -> int:
    value = payload.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"reasoning: {name} must be an integer from 0 to {most}, got {value!r}")
    return value
