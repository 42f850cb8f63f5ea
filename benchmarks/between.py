"""Between: say a number between two others. The shortest task that a small language model neither knows nor misses.

A family as a third party writes one: it is installed as a distribution of its own (`installed`), and nothing else here
knows it. Its prompt is some forty tokens and its answer a few, so that a model of 135 million parameters trains on two
cores within minutes; and there are many answers, so that siblings differ.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.envhost.environment import StepResult
from schemas.messages import Rollout, Task
from stages.handlers.base import Action, Grade, Invalid, Opening

LOWEST = range(10, 81)
"""What the lower number is drawn from."""

APART = range(5, 20)
"""How far the upper one lies above it: of two digits too."""

OPENING = (
    {"role": "system", "content": "Say a number between the two."},
    {"role": "user", "content": "20 and 35"},
    {"role": "assistant", "content": "27"},
)
"""What comes before the question."""


class Bounds:
    """Two numbers waiting for one between them: the environment of a task."""

    fast = True
    """Every call takes microseconds."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"between {seed}")
        self.low = draw.choice(LOWEST)
        self.high = self.low + draw.choice(APART)
        self.answer: int | None = None

    def reset(self) -> str:
        """Forget the answer and ask again."""
        self.answer = None
        return f"{self.low} and {self.high}"

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take the answer."""
        self.answer = int(action["arguments"]["number"])
        return StepResult(observation="", done=True)

    def verdict(self) -> dict[str, Any]:
        """What grading needs."""
        return {"answer": self.answer, "low": self.low, "high": self.high}

    def close(self) -> None:
        """Nothing to release."""


class Between:
    """The handler of the family."""

    family = "between"
    """Name by which tasks ask for it."""
    prompt_version = "between.1"
    """Version of its prompt."""
    invalid_ends = True
    """There is one turn."""

    def environment(self, payload: Mapping[str, Any], seed: int) -> Bounds:
        """Two numbers that the task's seed decides."""
        return Bounds(seed)

    def init(self, task: Task, observation: str) -> Opening:
        """An example, then the question."""
        return Opening(messages=(*OPENING, {"role": "user", "content": observation}))

    def act(self, text: str) -> Action | Invalid:
        """Read the one number that there is."""
        match re.findall(r"\d+", text):
            case [number]:
                return Action(text=text, name="say", arguments={"number": int(number[:9])})
            case found:
                return Invalid(text=text, reason=f"expected one number, got {len(found)}")

    def grade(self, rollout: Rollout, verdict: Mapping[str, Any]) -> Grade:
        """1 for a number between the two, else 0."""
        answer = verdict["answer"]
        right = float(answer is not None and verdict["low"] < answer < verdict["high"])
        return Grade(components={"right": right}, success=right)


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Let this process find the family while the block runs, as it finds those of any distribution."""
    information = folder / "between-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: between\nVersion: 1.0\n", encoding="utf-8")
    entry = "[rollmill.handlers]\nbetween = benchmarks.between:Between\n"
    (information / "entry_points.txt").write_text(entry, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
