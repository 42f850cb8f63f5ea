"""What is watched for a policy that goes astray, and when that is an alarm: pure functions of a step's figures.

    guard        figure of a step                                                        alarm where it is
    entropy      entropy of the policy at its start, nats per sampled token              below the bound
    repetition   mean share of an episode's n-grams that occurred in it before           above
    farming      mean reward of the samples that failed, process rewards included        above
    kl           KL to the reference, nats per token                                     above
    baseline     mean success of the last complete groups, kept and dropped alike        not above

One bad step proves nothing: an alarm is raised at the step that makes `steps` in a row. It is raised once, until a step
lies within the bound again; where the learning rate is halved, again after as many steps, since that did not help.
Figures follow from the log and the weights, and the counts are part of a checkpoint, so a trainer that was killed
anywhere is followed by one that raises the same alarms. What follows an alarm is `guarding.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from schemas.decisions import Action, Guard
from trainer.guards_config import BaselineRule, GuardRule, GuardsConfig
from trainer.terminal import Terminal

SUCCEEDED = 0.5
"""Success below which a sample has failed."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the guards look at in one step; none where a step says nothing about it."""

    entropy: float
    """Nats per sampled token, at step start."""
    repetition: float
    """Mean share of repeated n-grams."""
    unearned: float | None
    """Mean reward of its samples that failed."""
    kl: float
    """Nats per token."""
    recent_success: float | None
    """Mean success of the last complete groups."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An alarm that is due."""

    guard: Guard
    """Who raises it."""
    value: float
    """The figure."""
    bound: float
    """Its bound."""
    steps: int
    """Steps in a row beyond it."""
    action: Action
    """What shall follow."""
    cause: str
    """For a person."""


def judge(
    rules: GuardsConfig, counts: Mapping[str, int], figures: Figures
) -> tuple[dict[str, int], tuple[Finding, ...]]:
    """Return the counts after a step, and the alarms that are due at it.

    Args:
        rules: what is watched.
        counts: guard -> steps in a row, up to the one before, that were beyond its bound.
        figures: of the step.
    """
    after: dict[str, int] = {}
    found = []
    for beyond in _beyond(rules, figures):
        after[beyond.guard.value] = count = counts.get(beyond.guard.value, 0) + 1
        due = count % beyond.steps == 0 if beyond.action is Action.SLOW else count == beyond.steps
        if due:
            cause = beyond.cause + (f", {count} steps in a row" if count > 1 else "")
            found.append(replace(beyond, steps=count, cause=cause))
    return after, tuple(found)


def _beyond(rules: GuardsConfig, figures: Figures) -> Iterator[Finding]:
    """Yield the guards beyond whose bound a step is, each as the alarm that it would be after its `steps`."""
    for guard, rule, value, low, says in (
        (Guard.ENTROPY, rules.entropy, figures.entropy, True, "entropy of {:.3g} nats"),
        (Guard.REPETITION, rules.repetition, figures.repetition, False, "{:.1%} of an episode's n-grams are repeated"),
        (Guard.FARMING, rules.farming, figures.unearned, False, "samples that failed earned {:.3g} in the mean"),
        (Guard.KL, rules.kl, figures.kl, False, "KL of {:.3g} nats to the reference"),
    ):
        if rule is not None and value is not None and (value < rule.bound if low else value > rule.bound):
            cause = f"{says.format(value)}, {'below' if low else 'above'} {rule.bound:g}"
            yield _finding(guard, rule, value, rule.bound, cause)
    baseline, success = rules.baseline, figures.recent_success
    if baseline is not None and baseline.bound is not None and success is not None and success <= baseline.bound:
        cause = f"success of {success:.3f}, not above the {baseline.bound:.3f} of {baseline.rule or 'the baseline'}"
        yield _finding(Guard.BASELINE, baseline, success, baseline.bound, cause)


def _finding(guard: Guard, rule: GuardRule | BaselineRule, value: float, bound: float, cause: str) -> Finding:
    return Finding(guard=guard, value=value, bound=bound, steps=rule.steps, action=rule.action, cause=cause)


def unearned(samples: Iterable[Terminal]) -> float | None:
    """Return what samples that failed earned in the mean, process rewards included; none if none failed."""
    earned = [t.reward + sum(t.turn_rewards) for t in samples if t.success < SUCCEEDED]
    return sum(earned) / len(earned) if earned else None


def recent_success(recent: Sequence[float], groups: int) -> float | None:
    """Return the mean success of the last groups; none before there are as many as asked for."""
    return sum(recent) / len(recent) if len(recent) >= groups else None
