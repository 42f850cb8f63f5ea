"""How good a version is: the figures of a suite of tasks, the seam to whoever plays it, and what follows from figures.

Success is a mean over tasks, and its interval says what other tasks would give: a bootstrap over tasks, never over
samples, since the samples of a task are alike. Where every task is a whole success or a whole failure it is a
proportion, and Wilson's interval (1927) takes the place of the bootstrap, which would be a point for tasks that all
end alike. Samples that the system failed are missing: they are in no figure but the two bounds. Pure, but for the
protocol; it does not know how a suite is played, and never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from schemas.scores import Purpose, Scores

WILSON_Z = 1.959964
"""Quantile of the normal distribution for a 95 % interval."""

RESAMPLES = 2_000
"""Bootstrap samples of the tasks."""

CHOICES = 1_000_000
"""Choices of a task that are made at once."""

MOST_MISSING = 0.02
"""Share of missing samples above which a result is incomplete."""

SAME = 1e-6
"""Successes that differ by no more than this are alike."""


class Evaluator(Protocol):
    """Plays a run's suite with one version of its policy."""

    async def evaluate(self, version: int, step: int, purpose: Purpose) -> Scores:
        """Play it and return the figures; the policy serves that version until this returns.

        Args:
            version: the version to evaluate.
            step: the step that made it, for names.
            purpose: how it is sampled.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Played:
    """How one sample of a suite ended."""

    task: str
    """Its task; the samples of a task are alike."""
    success: float | None = None
    """Unshaped success; none if it is missing."""
    reward: float = 0.0
    """Shaped reward."""
    turns: int = 0
    """Turns played."""
    valid: int = 0
    """Of these, turns whose text was an allowed action."""
    mixed: bool = False
    """It is missing because other weights had a part in it."""


def scores(run: str, played: Sequence[Played]) -> Scores:
    """Return the figures of a suite that was played under a run."""
    graded = [(one, one.success) for one in played if one.success is not None]
    by_task: dict[str, list[float]] = {one.task: [] for one in played}
    for one, success in graded:
        by_task[one.task].append(success)
    known = [values for values in by_task.values() if values]
    means = [sum(values) / len(values) for values in known]
    low, high = interval(means)
    passes = chances(known)
    pass_intervals = [interval(values) for values in passes]
    total, missing = sum(success for _, success in graded), len(played) - len(graded)
    turns, valid = sum(one.turns for one, _ in graded), sum(one.valid for one, _ in graded)
    valid_low, valid_high = wilson(valid, turns)
    return Scores(
        run=run,
        tasks=len(by_task),
        samples=len(played),
        missing=missing,
        mixed=sum(one.mixed for one in played),
        incomplete=missing > MOST_MISSING * len(played) or not graded,
        success=_mean(means),
        low=low,
        high=high,
        worst=total / len(played) if played else 0.0,
        best=(total + missing) / len(played) if played else 1.0,
        reward=_mean([one.reward for one, _ in graded]),
        pass_at=tuple(_mean(values) for values in passes),
        varied=_mean([max(values) - min(values) > SAME for values in known]),
        turns=turns,
        turns_to_success=_mean([one.turns for one, success in graded if success >= 1 - SAME]),
        valid=valid / turns if turns else 0.0,
        valid_low=valid_low,
        valid_high=valid_high,
        pass_low=tuple(low for low, _ in pass_intervals),
        pass_high=tuple(high for _, high in pass_intervals),
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of tasks' values in [0, 1]; (0, 1) when nothing was observed."""
    if all(min(abs(value), abs(value - 1)) <= SAME for value in values):
        return wilson(sum(values), len(values))
    return bootstrap(values)


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson, 1927); (0, 1) when nothing was observed."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, WILSON_Z**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = WILSON_Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of a mean over tasks; the same values always give the same interval."""
    draw, found = np.random.default_rng(0), np.asarray(values, dtype=np.float64)
    # In parts: all choices of a large suite at once would take gigabytes.
    parts = np.array_split(np.empty(RESAMPLES), math.ceil(RESAMPLES * len(found) / CHOICES))
    means = [found[draw.integers(0, len(found), (len(part), len(found)))].mean(axis=1) for part in parts]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def chances(tasks: Iterable[Sequence[float]]) -> list[list[float]]:
    """Return for k = 1, 2, ... the chance that one of k samples solves it, of each task with at least k samples.

    Args:
        tasks: successes of the samples of each task; a sample solves its task if it succeeded wholly.
    """
    known = list(tasks)
    most = max(map(len, known), default=0)
    return [[pass_of(values, k) for values in known if len(values) >= k] for k in range(1, most + 1)]


def pass_of(successes: Sequence[float], k: int) -> float:
    """Return the chance that one of k samples of a task solves it: 1 - C(n - c, k) / C(n, k), c of n having done so."""
    n, c = len(successes), sum(value >= 1 - SAME for value in successes)
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def best(evaluations: Mapping[int, Scores]) -> int | None:
    """Return the step whose version achieved most; of several the first, since none after it achieved more.

    Args:
        evaluations: step -> what its version achieved; incomplete results are not compared.
    """
    complete = {step: found.success for step, found in evaluations.items() if not found.incomplete}
    return min(complete, key=lambda step: (-complete[step], step), default=None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
