"""Guess: find a number by asking, and hearing `higher` or `lower`. A task family in one file, as a package of its own.

Any text with one number is a guess, and one without is told so, so that a model of 135 million parameters takes part
from the first turn on. The environment holds the number; what is graded is how many guesses it took.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from infra.envhost.environment import StepResult
from schemas.messages import Rollout, Task
from stages.handlers.base import Action, Grade, Invalid, Opening

HIGHEST = 20
"""Numbers are 1 to this."""

PROMPT = f"I think of a number from 1 to {HIGHEST}. Guess it: say one number, and nothing else."


class Number:
    """A number that somebody thinks of: the environment of a task."""

    fast = True
    """Every call takes microseconds."""

    def __init__(self, seed: int) -> None:
        self._number = random.Random(f"guess {seed}").randint(1, HIGHEST)
        self._guesses: list[int] = []

    def reset(self) -> str:
        """Forget all guesses."""
        self._guesses = []
        return PROMPT

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take a guess."""
        guess = int(action["arguments"]["number"])
        self._guesses.append(guess)
        if guess == self._number:
            return StepResult(observation="", done=True)
        return StepResult(observation="higher" if guess < self._number else "lower", done=False)

    def verdict(self) -> dict[str, Any]:
        """What grading needs."""
        return {"number": self._number, "guesses": list(self._guesses)}

    def close(self) -> None:
        """Nothing to release."""


class Guess:
    """The handler of the family."""

    family = "guess"
    """Name by which tasks ask for it."""
    prompt_version = "guess.1"
    """Version of its prompt."""
    invalid_ends = False
    """Who says no number is asked again."""

    def environment(self, payload: Mapping[str, Any], seed: int) -> Number:
        """A number that the task's seed decides."""
        return Number(seed)

    def init(self, task: Task, observation: str) -> Opening:
        """The question."""
        return Opening(messages=({"role": "user", "content": observation},))

    def act(self, text: str) -> Action | Invalid:
        """Read the one number that there is."""
        match re.findall(r"\d+", text):
            case [number]:
                return Action(text=text, name="guess", arguments={"number": int(number[:9])})
            case found:
                return Invalid(text=text, reason=f"Say one number, not {len(found)}.")

    def grade(self, rollout: Rollout, verdict: Mapping[str, Any]) -> Grade:
        """1 for the number, less what the guesses before it cost."""
        guesses = verdict["guesses"]
        found = float(bool(guesses) and guesses[-1] == verdict["number"])
        return Grade(components={"found": found, "guesses": -0.02 * max(0, len(guesses) - 1)}, success=found)
