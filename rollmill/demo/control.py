"""The demo's control: the same run with rewards that siblings have traded, which must not rise.

What is compared is success on the same hunts before and after, hunt by hunt: with 95 % confidence the mean difference
lies in the interval. A control may fall, for it is moved at random. One that rises has learnt without its reward, and
then the demo's own rise proves nothing about the reward either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.messages import Trajectory
from schemas.outcome import Completed
from trainer.evaluation import bootstrap


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Success after less success before, on the same hunts."""

    mean: float
    """Over hunts."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    """Upper end."""

    @property
    def rose(self) -> bool:
        """Tell whether success rose by more than chance."""
        return self.low > 0

    def __str__(self) -> str:
        """Return it for a person."""
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def difference(before: Mapping[int, float], after: Mapping[int, float]) -> Difference:
    """Return how far success moved on the hunts that both were played on."""
    moved = [after[hunt] - before[hunt] for hunt in sorted(before.keys() & after.keys())]
    low, high = bootstrap(moved)
    return Difference(mean=sum(moved) / len(moved), low=low, high=high)


def by_hunt(trajectories: Sequence[Trajectory]) -> dict[int, float]:
    """Return hunt -> success."""
    return {t.task.row: t.outcome.success for t in trajectories if isinstance(t.outcome, Completed)}
