"""What a task family is: init, act and grade as pure functions, and the environment they talk about.

`init` is called in INIT, `act` in RUN, `grade` in EVAL, from the record alone; `environment` only in the environment
host. A handler that raises fails the rollout with a typed failure; it never costs the policy a reward and never stops
a stage. Success and the shaped reward are kept apart: `success` is in [0, 1] and unshaped.

A family whose agent is a program of its own, which only knows the `base_url` of a chat API, is a *harness*: it says so
by `harness = True`. RUN answers its calls (`stages/run/harness.py`) instead of driving turns, so `act` is never called,
and the messages of `init` are shown to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from infra.envhost.environment import Environment
from schemas.messages import Rollout, Task


@dataclass(frozen=True, slots=True)
class Opening:
    """How the conversation begins."""

    messages: tuple[dict[str, Any], ...]
    """Chat messages, `role` and `content` each; the last one is not the assistant's."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tool schemas for the chat template."""


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy's text asks the environment to do."""

    text: str
    """The policy's text."""
    name: str
    """The action."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Its arguments; msgpack types only."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """The policy's text holds no allowed action."""

    text: str
    """The policy's text."""
    reason: str
    """What is wrong with it; shown to the policy if the episode goes on."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The score of a finished rollout."""

    components: dict[str, float]
    """Reward by component; the shaped reward is their sum."""
    success: float
    """Unshaped success in [0, 1]."""
    turn_rewards: tuple[float, ...] = ()
    """Process reward of each turn of the transcript, such as a milestone when it is first reached; not in the sum."""


class Handler(Protocol):
    """One task family."""

    family: str
    """Name by which tasks ask for it."""
    prompt_version: str
    """Version of its prompt, recorded with every episode."""
    invalid_ends: bool
    """An invalid action ends the episode; otherwise its reason is the next observation."""

    def environment(self, payload: Mapping[str, Any], seed: int) -> Environment:
        """Build the environment of one instance. Raises ValueError for a bad payload."""
        ...

    def init(self, task: Task, observation: str) -> Opening:
        """Return the opening of the conversation for the first observation."""
        ...

    def act(self, text: str) -> Action | Invalid:
        """Read an action out of the policy's text."""
        ...

    def grade(self, rollout: Rollout, verdict: Mapping[str, Any]) -> Grade:
        """Score a finished rollout from its record and the environment's final state."""
        ...


def is_harness(handler: Handler) -> bool:
    """Tell whether a family's agent drives itself; one that does not speak of it has none."""
    return getattr(handler, "harness", False) is True
