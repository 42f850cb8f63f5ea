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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.decisions import Action, Guard
from trainer.config import BaselineRule, GuardsConfig
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


@dataclass(frozen=True, kw_only=True)
class _Watched:
    """A guard at one step."""

    value: float | None
    beyond: bool
    bound: float
    steps: int
    action: Action
    says: str
    """The figure and its bound, for a person."""


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
    for guard, watched in _watched(rules, figures).items():
        if watched.value is None or not watched.beyond:
            continue
        after[guard.value] = count = counts.get(guard.value, 0) + 1
        again = watched.action is Action.SLOW and count % watched.steps == 0
        if count == watched.steps or again:
            found.append(
                Finding(
                    guard=guard,
                    value=watched.value,
                    bound=watched.bound,
                    steps=count,
                    action=watched.action,
                    cause=watched.says + (f", {count} steps in a row" if count > 1 else ""),
                )
            )
    return after, tuple(found)


def _watched(rules: GuardsConfig, figures: Figures) -> dict[Guard, _Watched]:
    """Return the guards that a run has, as they find a step."""
    found: dict[Guard, _Watched] = {}
    for guard, rule, value, low, says in (
        (Guard.ENTROPY, rules.entropy, figures.entropy, True, "entropy of {:.3g} nats"),
        (Guard.REPETITION, rules.repetition, figures.repetition, False, "{:.1%} of an episode's n-grams are repeated"),
        (Guard.FARMING, rules.farming, figures.unearned, False, "samples that failed earned {:.3g} in the mean"),
        (Guard.KL, rules.kl, figures.kl, False, "KL of {:.3g} nats to the reference"),
    ):
        if rule is not None:
            found[guard] = _Watched(
                value=value,
                beyond=value is not None and (value < rule.bound if low else value > rule.bound),
                bound=rule.bound,
                steps=rule.steps,
                action=rule.action,
                says=f"{says.format(value or 0.0)}, {'below' if low else 'above'} {rule.bound:g}",
            )
    if rules.baseline is not None and rules.baseline.bound is not None:
        found[Guard.BASELINE] = _beside(rules.baseline, rules.baseline.bound, figures.recent_success)
    return found


def _beside(rule: BaselineRule, bound: float, success: float | None) -> _Watched:
    return _Watched(
        value=success,
        beyond=success is not None and success <= bound,
        bound=bound,
        steps=rule.steps,
        action=rule.action,
        says=f"success of {success or 0.0:.3f}, not above the {bound:.3f} of {rule.rule or 'the baseline'}",
    )


def unearned(samples: Iterable[Terminal]) -> float | None:
    """Return what samples that failed earned in the mean, process rewards included; none if none failed."""
    earned = [t.reward + sum(t.turn_rewards) for t in samples if t.success < SUCCEEDED]
    return sum(earned) / len(earned) if earned else None


def recent_success(recent: Sequence[float], groups: int) -> float | None:
    """Return the mean success of the last groups; none before there are as many as asked for."""
    return sum(recent) / len(recent) if len(recent) >= groups else None
