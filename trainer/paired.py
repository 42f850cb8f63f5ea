"""Two policies on the same tasks and environment seeds: which one is better, and how sure that is. Pure.

    d(task)        mean success of the second policy's samples - that of the first one's
    difference     mean of d over tasks, with a bootstrap over tasks: the two sides of a task stay together, so what
                   makes a task hard for both is no doubt about which is better
    McNemar        tasks that one policy did better than the other, against a fair coin, exactly; tasks that both did
                   alike say nothing

With one sample per task, which succeeds or not, the last is McNemar's exact test (1947); with several it is the sign
test over tasks. It is never over samples, since those of a task are alike. Samples that the system failed are missing:
they are in no figure but the bounds, which say what the figures would be if all of them had failed, or succeeded.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum
from typing import TypeVar

from trainer.evaluation import MOST_MISSING, SAME, bootstrap, interval, pass_of, wilson

T = TypeVar("T", bound=Hashable)

Pair = tuple[Sequence[float], Sequence[float]]
"""Successes of the graded samples of one task, of the first policy and of the second."""

CERTAIN = 0.05
"""Two policies are told apart if the test says at most this, and the interval of the difference leaves 0 out."""


class Better(StrEnum):
    """What a comparison says."""

    FIRST = "first"
    """The first policy achieves more."""
    SECOND = "second"
    """The second policy achieves more."""
    NEITHER = "neither"
    """These tasks do not tell them apart."""
    INCOMPLETE = "incomplete"
    """Too many samples are missing to say."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over tasks."""

    value: float
    """The mean."""
    low: float
    """Lower end of its 95 % interval, over tasks."""
    high: float
    """Upper end."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two policies, on the tasks that both were asked to do."""

    samples: int
    """Samples asked for."""
    missing: int
    """Of these, samples without a grade that counts."""
    success: Estimate
    """Success, over the tasks of which both have grades."""
    worst: float
    """The same over all tasks, if every missing sample had failed."""
    best: float
    """The same, if every missing sample had succeeded."""
    pass_at: tuple[Estimate, ...]
    """Chance that one of k samples solves a task, for k = 1, 2, ...; over tasks of which both have k grades."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two policies on the same tasks; a difference is the second less the first."""

    tasks: int
    """Tasks that both were asked to do."""
    pairs: int
    """Of these, tasks of which both have grades."""
    first: Side
    """The one."""
    second: Side
    """The other."""
    difference: Estimate
    """Of success."""
    worst: float
    """The same over all tasks, if every missing sample had spoken for the first."""
    best: float
    """The same, if every missing sample had spoken for the second."""
    pass_at: tuple[Estimate, ...]
    """Difference of the chance that one of k samples solves a task, for k = 1, 2, ..."""
    first_better: int
    """Tasks that the first did better."""
    second_better: int
    """Tasks that the second did better."""
    p: float
    """McNemar's exact test, two-sided."""
    incomplete: bool
    """One of them lacks more than 2 % of its samples, or there is no pair."""

    @property
    def better(self) -> Better:
        """What follows: interval and test must both say so, since each is rough where tasks are few."""
        if self.incomplete:
            return Better.INCOMPLETE
        if self.p <= CERTAIN and self.difference.low > 0:
            return Better.SECOND
        if self.p <= CERTAIN and self.difference.high < 0:
            return Better.FIRST
        return Better.NEITHER


def compare(
    first: Mapping[T, Sequence[float | None]],
    second: Mapping[T, Sequence[float | None]],
    *,
    silent: tuple[int, int] = (0, 0),
) -> Comparison:
    """Compare two policies.

    Args:
        first: task -> success of each sample that the one was asked for, none if it is missing.
        second: the same of the other; only tasks that are in both count.
        silent: further tasks that each of them was asked to do, and of which nothing is known.
    """
    asked = [(first[task], second[task]) for task in first if task in second]
    pairs = [pair for one, other in asked if all(pair := (_graded(one), _graded(other)))]
    differences = [_mean(other) - _mean(one) for one, other in pairs]
    # Nobody knows which tasks are silent: they may be the same ones or others, and the bounds allow for either.
    tasks = len(asked) + max(silent)
    ours = _side([one for one, _ in asked], pairs, 0, tasks, silent[0])
    theirs = _side([other for _, other in asked], pairs, 1, tasks, silent[1])
    first_better, second_better = sum(d < -SAME for d in differences), sum(d > SAME for d in differences)
    return Comparison(
        tasks=tasks,
        pairs=len(pairs),
        first=ours,
        second=theirs,
        difference=difference_of(differences),
        worst=theirs.worst - ours.best,
        best=theirs.best - ours.worst,
        pass_at=tuple(
            difference_of([pass_of(other, k) - pass_of(one, k) for one, other in chosen]) for k, chosen in _by_k(pairs)
        ),
        first_better=first_better,
        second_better=second_better,
        p=mcnemar(first_better, second_better),
        incomplete=not pairs or any(side.missing > MOST_MISSING * side.samples for side in (ours, theirs)),
    )


def mcnemar(one: int, other: int) -> float:
    """Return McNemar's exact two-sided p for the numbers of tasks that each of two policies did better.

    Twice the chance that a fair coin falls on the rarer side this seldom: 2 * sum over i <= min of C(n, i) / 2^n.
    """
    n, choices, total = one + other, 1, 0
    for i in range(min(one, other) + 1):
        total += choices
        choices = choices * (n - i) // (i + 1)
    return min(1.0, 2 * total / (1 << n))


def difference_of(values: Sequence[float]) -> Estimate:
    """Return the mean of tasks' differences in [-1, 1] with its interval; (-1, 1) when nothing was observed.

    A bootstrap of values that are all alike is a point, which no choice of tasks can claim. Then as many tasks as
    Wilson's interval leaves room for may differ from all that were met, and differ wholly.
    """
    if not values:
        return Estimate(value=0.0, low=-1.0, high=1.0)
    mean = _mean(values)
    if max(values) - min(values) <= SAME:
        _, unseen = wilson(0, len(values))
        return Estimate(value=mean, low=mean - unseen * (1 + mean), high=mean + unseen * (1 - mean))
    low, high = bootstrap(sorted(values))  # in whatever order tasks ended, the same interval
    return Estimate(value=mean, low=low, high=high)


def _side(asked: Sequence[Sequence[float | None]], pairs: Sequence[Pair], at: int, tasks: int, silent: int) -> Side:
    """Return the figures of one policy.

    Args:
        asked: all its samples, by task.
        pairs: the graded ones of both policies.
        at: which of the two it is.
        tasks: tasks in all, those of which nothing is known included.
        silent: how many of these the policy itself was asked to do.
    """
    known, unknown = sum(map(len, asked)), silent * max(map(len, asked), default=1)
    failed, solved = (fsum(_mean(_filled(values, missing)) for values in asked) for missing in (0.0, 1.0))
    return Side(
        samples=known + unknown,
        missing=sum(value is None for values in asked for value in values) + unknown,
        success=_estimate([_mean(pair[at]) for pair in pairs]),
        worst=failed / tasks if tasks else 0.0,
        best=(solved + tasks - len(asked)) / tasks if tasks else 1.0,
        pass_at=tuple(_estimate([pass_of(pair[at], k) for pair in chosen]) for k, chosen in _by_k(pairs)),
    )


def _by_k(pairs: Sequence[Pair]) -> list[tuple[int, list[Pair]]]:
    """Return for k = 1, 2, ... the tasks of which both policies have k graded samples, as long as there are any."""
    most = max((min(map(len, pair)) for pair in pairs), default=0)
    return [(k, [pair for pair in pairs if min(map(len, pair)) >= k]) for k in range(1, most + 1)]


def _estimate(values: Sequence[float]) -> Estimate:
    low, high = interval(sorted(values))
    return Estimate(value=_mean(values), low=low, high=high)


def _graded(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _filled(values: Sequence[float | None], missing: float) -> list[float]:
    return [missing if value is None else value for value in values]


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values) if values else 0.0
