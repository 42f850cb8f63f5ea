"""What deciding depends on, and which complete groups are trained on: pure functions of a group and the rules.

A group is judged at the record that completes it. Failed, cancelled and expired siblings are outside the test,
truncated ones inside. Which groups make a step, and when, is in `groups.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from schemas.decisions import DropReason
from trainer.algorithm_config import AlgorithmConfig, Estimator, Filter, Late
from trainer.config import CurriculumConfig, OnNoVariance, StopConfig
from trainer.curriculum import PhaseRules
from trainer.group import Group

CONSTANT = CurriculumConfig()
"""Nothing changes with the steps."""

VARIANCE_TOLERANCE = 1e-6
"""Siblings differ if their largest and smallest value are further apart than this."""


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """What the decisions depend on."""

    groups: int
    """Groups in one step."""
    siblings_needed: int
    """Fewest completed siblings of a group that is trained on."""
    filter: Filter
    """What must differ between siblings."""
    max_lag: int
    """Tokens with a larger lag are not trained on."""
    replayed: bool = False
    """Tokens of another run's weights count as `max_lag` steps old, not as too old."""
    estimator: Estimator
    """How rewards become advantages."""
    std: bool
    """Divide by the standard deviation."""
    recent: int = 64
    """Complete groups in the mean success."""
    late: Late = Late.MASK
    """What becomes of tokens with a larger lag."""
    keep_solved: float = 0.0
    """Share of the groups without variance, all solved, that is kept."""
    shuffle_seed: int | None = None
    """Siblings trade their rewards by this seed; none: each keeps its own."""
    most_dropped: int | None = None
    """Groups dropped in a row after which a step may have fewer groups; none: it never has."""
    phases: PhaseRules | None = None
    """When a phase of the curriculum ends; none where the number of steps says it."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, stop: StopConfig, curriculum: CurriculumConfig = CONSTANT) -> GroupRules:
        """Return the rules that a configuration states."""
        return cls(
            groups=algorithm.groups,
            siblings_needed=algorithm.siblings_needed,
            filter=algorithm.filter,
            max_lag=algorithm.max_lag,
            replayed=algorithm.replayed,
            estimator=algorithm.estimator,
            std=algorithm.std,
            recent=stop.success_groups,
            late=algorithm.late,
            keep_solved=algorithm.keep_solved,
            shuffle_seed=algorithm.shuffle_seed,
            most_dropped=stop.max_dropped if stop.on_no_variance is OnNoVariance.FEWER else None,
            phases=PhaseRules.of(curriculum),
        )


def reason_to_drop(group: Group, rules: GroupRules, lag: Callable[[int], int]) -> DropReason | None:
    """Return why a complete group is not trained on; none if it is.

    Args:
        group: the group.
        rules: by which it is judged.
        lag: steps between a version and the weights that the next step trains. A kept group belongs to the next step,
            so this is its lag at use; only under `wait` may it be used later, and is then in time all the same.
    """
    if len(group.completed) < rules.siblings_needed:
        return DropReason.INCOMPLETE
    if not varies(group, rules.filter) and not _kept_as_solved(group, rules.keep_solved):
        return DropReason.NO_VARIANCE
    lags = [lag(version) for t in group.completed for version, tokens in t.sampled if tokens]
    if rules.late is Late.DROP and max(lags, default=0) > rules.max_lag:
        return DropReason.LATE
    if min(lags, default=rules.max_lag + 1) > rules.max_lag:
        return DropReason.STALE
    return None


def varies(group: Group, rule: Filter) -> bool:
    """Tell whether the graded siblings differ in what the rule looks at."""
    match rule:
        case Filter.OFF:
            return True
        case Filter.SUCCESS:
            values = [t.success for t in group.completed]
        case Filter.REWARD:
            values = [t.reward for t in group.completed]
    return max(values, default=0.0) - min(values, default=0.0) > VARIANCE_TOLERANCE


def _kept_as_solved(group: Group, share: float) -> bool:
    solved = all(t.success > 1 - VARIANCE_TOLERANCE for t in group.completed)
    return solved and drawn(group.id) < share


def drawn(group: str) -> float:
    """Return a number in [0, 1) that follows from a group's id, evenly spread over groups."""
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=6).digest(), "big") / 2**48
