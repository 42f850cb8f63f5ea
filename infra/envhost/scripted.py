"""An environment for tests that remembers what was done to it: the twin of a real task.

Its verdict is the list of actions since the last reset, so that a test can tell which rollout a verdict belongs to.
It also holds its host to the rules: one caller at a time, nothing after `close`, `close` once. A payload may make it
fail on purpose: `raise_in` names a method, `refuse` makes the factory raise ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from infra.envhost.environment import StepResult


class ScriptedEnvironment:
    """Counts, remembers and, if the payload says so, raises.

    Args:
        payload: may hold `raise_in` (a method's name) and `length` (steps until done).
        seed: appears in the first observation.
        inside: called during each step, such as to block it.
    """

    fast = False

    def __init__(self, payload: Mapping[str, Any], seed: int, inside: Callable[[], None] = lambda: None) -> None:
        self.payload = payload
        self.seed = seed
        self.actions: list[str] = []
        self.resets = 0
        self.closes = 0
        self._inside = inside
        self._busy = False

    def reset(self) -> str:
        """Forget all actions."""
        self._enter("reset")
        self.resets += 1
        self.actions = []
        return f"start {self.seed}"

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Remember an action; its number is the observation."""
        self._enter("step")
        self._busy = True
        self._inside()
        self._busy = False
        self.actions.append(action["text"])
        count = len(self.actions)
        return StepResult(observation=f"{count}", done=count >= self.payload.get("length", 100))

    def verdict(self) -> dict[str, Any]:
        """Return the actions since the last reset."""
        self._enter("verdict")
        return {"actions": list(self.actions), "seed": self.seed}

    def close(self) -> None:
        """Note that it was closed."""
        self._enter("close")
        self.closes += 1

    def _enter(self, method: str) -> None:
        if self.closes:
            raise AssertionError(f"{method} of a closed environment")
        if self._busy:
            raise AssertionError(f"{method} while another caller is inside")
        if self.payload.get("raise_in") == method:
            raise RuntimeError(f"{method} was told to fail")


class FastScriptedEnvironment(ScriptedEnvironment):
    """The same on the host's event loop."""

    fast = True


class ScriptedFactory:
    """Builds scripted environments and keeps all of them for the test to look at.

    Args:
        kind: which class to build.
        inside: handed to each environment.
    """

    def __init__(
        self, kind: type[ScriptedEnvironment] = ScriptedEnvironment, inside: Callable[[], None] = lambda: None
    ) -> None:
        self.built: list[ScriptedEnvironment] = []
        self._kind = kind
        self._inside = inside

    def __call__(self, family: str, payload: Mapping[str, Any], seed: int) -> ScriptedEnvironment:
        """Build one; a payload with `refuse` is a bad payload."""
        if "refuse" in payload:
            raise ValueError(f"{family} refuses this payload: {payload['refuse']}")
        environment = self._kind(payload, seed, self._inside)
        self.built.append(environment)
        return environment
