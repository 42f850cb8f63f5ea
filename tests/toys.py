"""Task families for tests, found as third parties' are: through entry points of a distribution on the path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.envhost.scripted import ScriptedEnvironment
from schemas.messages import Rollout, Task
from stages.handlers import registry
from stages.handlers.base import Action, Grade, Invalid, Opening

WORDS = ("start", "hello", "explode", "nonsense", "say", "something", "else", *(str(number) for number in range(10)))
"""What toys hear and say; any other word is unknown to their tokenizer."""


class Toy:
    """Says words to a scripted environment.

    A payload may hold `raise_in` (a method of the family or of the environment), `length` (turns until done),
    `components`, `success` and `turn_rewards` (the grade), or `numpy` (a grade in numpy's numbers).
    """

    family = "toy"
    prompt_version = "toy.1"
    invalid_ends = True

    def environment(self, payload: Mapping[str, Any], seed: int) -> ScriptedEnvironment:
        """Build the environment that remembers."""
        return ScriptedEnvironment(payload, seed)

    def init(self, task: Task, observation: str) -> Opening:
        """Open with the observation."""
        self._may_raise(task, "init")
        return Opening(messages=({"role": "user", "content": observation},))

    def act(self, text: str) -> Action | Invalid:
        """Take any text, but not the word `nonsense`; `explode` is this family's bug."""
        if "explode" in text:
            raise RuntimeError("act was told to fail")
        if "nonsense" in text:
            return Invalid(text=text, reason="say something else")
        return Action(text=text, name="say")

    def grade(self, rollout: Rollout, verdict: Mapping[str, Any]) -> Grade:
        """Grade as the payload says."""
        self._may_raise(rollout.task, "grade")
        payload = rollout.task.payload
        if payload.get("numpy"):
            return Grade(components={"said": np.float32(0.5)}, success=np.bool_(True))
        return Grade(
            components=payload.get("components", {"said": 1.0}),
            success=payload.get("success", 1.0),
            turn_rewards=payload.get("turn_rewards", ()),
        )

    def _may_raise(self, task: Task, method: str) -> None:
        if task.payload.get("raise_in") == method:
            raise RuntimeError(f"{method} was told to fail")


class PatientToy(Toy):
    """The same, but it goes on after nonsense."""

    family = "patient_toy"
    invalid_ends = False


class HarshToy(Toy):
    """The same with a grader that nothing pleases, and that fails on what has four turns."""

    family = "harsh_toy"

    def grade(self, rollout: Rollout, verdict: Mapping[str, Any]) -> Grade:
        """Give a quarter for trying."""
        if len(rollout.transcript.turns) == 4:
            raise RuntimeError("four is too much")
        return Grade(components={"tried": 0.25}, success=0.0)


class BrokenToy(Toy):
    """A family whose handler cannot even be made."""

    family = "broken_toy"

    def __init__(self) -> None:
        raise OSError("no disk")


ENTRY_POINTS = """
[rollmill.handlers]
toy = tests.toys:Toy
patient_toy = tests.toys:PatientToy
harsh_toy = tests.toys:HarshToy
broken_toy = tests.toys:BrokenToy
harness_toy = tests.harness_toys:HarnessToy
program_toy = tests.harness_toys:ProgramToy
absent_toy = tests.toys_that_are_not_there:Toy
unnamed_toy = tests.toys:Nobody
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the toys for one test, as a distribution in `folder`."""
    information = folder / "toys-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder))
    registry.handler.cache_clear()
