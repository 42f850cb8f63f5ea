"""How a rollout ends: outcomes are data, and a failure is never a reward.

A limit on the policy (turns, sampled tokens, context, a loop) ends an episode as `Completed` and truncated, graded as
it stands. A limit on the system (a queue, a lost host, a deadline) is `Failed` or `Expired` and carries no reward.
This file does not know how failures are retried: that is `retries.py`.
"""

from __future__ import annotations

import math
from enum import StrEnum

from schemas.message import Part


class StopReason(StrEnum):
    """Why an episode took no further turn."""

    DONE = "done"
    """The environment said that the task is over."""
    INVALID_ACTION = "invalid_action"
    """The policy's text held no allowed action and the family ends the episode on that."""
    TURNS = "turns"
    """The horizon of the task was reached (truncated)."""
    TOKENS = "tokens"
    """The budget of sampled tokens was used up (truncated)."""
    CONTEXT = "context"
    """The next prompt would not fit into the model's context (truncated)."""
    REPETITION = "repetition"
    """An answer repeated itself more often than its sampling parameters allow (truncated)."""

    @property
    def truncated(self) -> bool:
        """Tell whether a limit on the policy, not the task, ended the episode."""
        return self in {StopReason.TURNS, StopReason.TOKENS, StopReason.CONTEXT, StopReason.REPETITION}


class FailureKind(StrEnum):
    """What went wrong, as far as the retry rules need to know."""

    INFRASTRUCTURE = "infrastructure"
    """A service did not answer or answered nonsense; another attempt may succeed."""
    ENVIRONMENT_LOST = "environment_lost"
    """The environment's lease ran out or its host restarted; another attempt starts afresh."""
    ENGINE = "engine"
    """The policy engine failed or returned what cannot be trained on; another attempt may succeed."""
    RATE_LIMIT = "rate_limit"
    """A service was there and asked for less, for longer than a stage waits; another attempt comes later."""
    HANDLER = "handler"
    """The family's own code raised; the same task would raise again."""
    INVALID_TASK = "invalid_task"
    """The task itself cannot be run: unknown family, bad payload."""


class Boundary(StrEnum):
    """The seam at which a failure crossed into a stage."""

    TASK = "task"
    """The task's own content."""
    HANDLER_INIT = "handler.init"
    """`Handler.init`."""
    HANDLER_ACT = "handler.act"
    """`Handler.act`."""
    HANDLER_GRADE = "handler.grade"
    """`Handler.grade`."""
    ENVIRONMENT = "environment"
    """The environment host and what runs in it."""
    POLICY = "policy"
    """The inference engine."""
    TRANSCRIPT = "transcript"
    """The token record broke one of its invariants."""
    STAGE = "stage"
    """The stage itself."""


class Completed(Part, frozen=True, kw_only=True, tag_field="outcome", tag="completed"):
    """The episode ended by itself or by a limit on the policy, and was graded."""

    components: dict[str, float]
    """Reward by component."""
    reward: float
    """The shaped reward: the sum of the components."""
    success: float
    """Unshaped success in [0, 1]; the variance test reads this."""
    truncated: bool
    """A limit on the policy ended the episode."""
    turn_rewards: tuple[float, ...] = ()
    """Process reward of each turn, beside the components and not in `reward`; none where the family gives none."""


def grade_flaw(done: Completed, turns: int) -> str | None:
    """Return why a grade cannot count, for whoever wrote the grader; None if it can.

    EVAL asks it of what a grader gave, and every reader of a record that somebody else may have written.

    Args:
        done: the grade.
        turns: turns of the episode.
    """
    of_turns = {f"the reward of turn {number}": value for number, value in enumerate(done.turn_rewards)}
    for name, value in {**done.components, **of_turns, "the sum": done.reward, "success": done.success}.items():
        if not math.isfinite(value):
            return f"{name} is {value}, not a finite number"
    if not 0.0 <= done.success <= 1.0:
        return f"success is {done.success}, outside [0, 1]"
    if done.turn_rewards and len(done.turn_rewards) != turns:
        return f"{len(done.turn_rewards)} process rewards for {turns} turns: give one for each turn, or none"
    return None


class Failed(Part, frozen=True, kw_only=True, tag_field="outcome", tag="failed"):
    """The system failed the episode; it says nothing about the policy."""

    kind: FailureKind
    """What went wrong."""
    boundary: Boundary
    """Where it was seen."""
    cause: str
    """The error, for a person."""


class Cancelled(Part, frozen=True, kw_only=True, tag_field="outcome", tag="cancelled"):
    """Somebody withdrew the task."""

    cause: str
    """Who or what withdrew it."""


class Expired(Part, frozen=True, kw_only=True, tag_field="outcome", tag="expired"):
    """The task was not done when its time ran out."""

    cause: str
    """Which limit ran out."""


Outcome = Completed | Failed | Cancelled | Expired
