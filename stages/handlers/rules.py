"""Scripted rules: who plays a family without a model, so that training has something to beat.

A family may have some (`rules`, by name). A rule sees what the policy sees, the observations, and says a text; nothing
of the pipeline is used, so a few hundred tasks take as long as their environments do. It is a yardstick and no rollout:
there are no tokens, and a family whose grader reads the token record cannot be played like this.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from infra.envhost.environment import Environment
from infra.errors import ConfigError
from schemas.messages import Rollout, Task
from schemas.outcome import StopReason
from schemas.transcript import Transcript
from stages.handlers.base import Handler, Invalid

Rule = Callable[[Sequence[str], random.Random], str]
"""Sees the observations so far, the newest last, and its own dice; says a text."""


@runtime_checkable
class Ruled(Protocol):
    """A family that has rules."""

    rules: Mapping[str, Rule]
    """By name."""


def rule_of(handler: Handler, name: str) -> Rule:
    """Return a rule of a family. Raises ConfigError, which names those that there are."""
    known = handler.rules if isinstance(handler, Ruled) else {}
    if name not in known:
        there_are = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise ConfigError(f"family {handler.family!r} has no rule {name!r}: {there_are}")
    return known[name]


def play(handler: Handler, rule: Rule, task: Task) -> float:
    """Return the success of a rule at a task; the same task always ends alike."""
    environment = handler.environment(task.payload, task.seed)
    try:
        stop = _turns(handler, rule, environment, task)
        verdict = environment.verdict()
    finally:
        environment.close()
    rollout = Rollout(
        task=task,
        transcript=Transcript(tokens=b"", mask=b"", logprobs=b"", spans=(), turns=()),
        verdict=verdict,
        stop=stop,
        backend="rule",
        worker="rule",
        tokenizer_digest="",
    )
    return float(handler.grade(rollout, verdict).success)


def _turns(handler: Handler, rule: Rule, environment: Environment, task: Task) -> StopReason:
    """Take turns as RUN does, and return why there is no further one."""
    dice = random.Random(f"rule {task.seed} {task.sample}")
    seen = [environment.reset()]
    for _ in range(task.horizon):
        act = handler.act(rule(seen, dice))
        if isinstance(act, Invalid):
            if handler.invalid_ends:
                return StopReason.INVALID_ACTION
            seen.append(act.reason)
            continue
        result = environment.step({"name": act.name, "arguments": act.arguments, "text": act.text})
        if result.done:
            return StopReason.DONE
        seen.append(result.observation)
    return StopReason.TURNS
