"""What changes from phase to phase: horizon, temperature and reward weights, stamped on groups at admission.

    by steps      phase = min(steps made // every, phases - 1)
    by success    a phase ends with the step at which the mean success of its last `success_groups` groups reaches
                  `success`, or at which it has had `every` steps, if that is given; the last one stays

By steps, steps 0 to every - 1 are the first phase: ScalingInter-RL (Xi et al. 2025) lets the horizon grow like this. By
success, a group is of the phase that was stamped on it, so that what was still on its way from an easier phase says
nothing about the next one; a step ends at most one phase. A schedule that is not given is the constant of `algorithm`,
or of `rewards`. Pure: by steps the phase follows from the configuration, which `TrainerStarted` carries; by success it
follows from the log, and is written down with each step. No clock is asked. Siblings share what was stamped on their
group; groups that are on their way when a phase begins keep the phase before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from schemas.message import Part
from schemas.messages import Shaping
from trainer.algorithm_config import AlgorithmConfig
from trainer.config import CurriculumConfig, RewardsConfig

T = TypeVar("T")

AS_GRADED = RewardsConfig()
"""Rewards as the family gives them."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What a group is sampled with."""

    horizon: int
    """Most turns of an episode."""
    temperature: float
    """Sampling temperature."""
    shaping: Shaping | None = None
    """How much the parts of its reward count; as the family gives them if none."""


@dataclass(frozen=True, kw_only=True)
class PhaseRules:
    """When a phase ends by success."""

    success: float
    """Mean success."""
    groups: int
    """Groups in it."""
    every: int | None
    """Most steps of a phase."""
    last: int
    """The phase that stays."""

    @classmethod
    def of(cls, curriculum: CurriculumConfig) -> PhaseRules | None:
        """Return the rules that a configuration states; none if its phases end by steps alone, or there are none."""
        if curriculum.success is None:
            return None
        return cls(
            success=curriculum.success,
            groups=curriculum.success_groups,
            every=curriculum.every,
            last=_last_phase(curriculum),
        )


class PhaseState(Part, frozen=True, kw_only=True):
    """Where a run is in a curriculum by success."""

    phase: int = 0
    """The phase."""
    since: int = 0
    """Steps made when it began."""
    recent: tuple[float, ...] = ()
    """Mean success of its last complete groups, oldest first."""

    def met(self, phase: int, success: float, rules: PhaseRules) -> PhaseState:
        """Return the state after a group was completed that was admitted in a phase."""
        if phase != self.phase:
            return self
        return PhaseState(phase=self.phase, since=self.since, recent=(*self.recent, success)[-rules.groups :])

    def decided(self, steps: int, rules: PhaseRules) -> PhaseState:
        """Return the state after so many steps were decided."""
        enough = len(self.recent) == rules.groups and sum(self.recent) / rules.groups >= rules.success
        over = rules.every is not None and steps - self.since >= rules.every
        return self.at(self.phase + 1, steps) if (enough or over) and self.phase < rules.last else self

    def at(self, phase: int, steps: int) -> PhaseState:
        """Return the state of a run that is known to be in a phase after so many steps."""
        return self if phase == self.phase else PhaseState(phase=phase, since=steps)


def phase_after(curriculum: CurriculumConfig, steps: int) -> int:
    """Return the phase after so many steps, where phases end by steps; the last one is the highest."""
    return min(steps // curriculum.every, _last_phase(curriculum)) if curriculum.every else 0


def stamp(
    algorithm: AlgorithmConfig, curriculum: CurriculumConfig, phase: int, rewards: RewardsConfig = AS_GRADED
) -> Stamp:
    """Return what groups are stamped with that are admitted in a phase."""
    return Stamp(
        horizon=_of_phase(curriculum.horizons or (algorithm.horizon,), phase),
        temperature=_of_phase(curriculum.temperatures or (algorithm.temperature,), phase),
        shaping=_shaping(rewards, {**rewards.weights, **_of_phase(curriculum.weights or ({},), phase)}),
    )


def final_stamp(algorithm: AlgorithmConfig, curriculum: CurriculumConfig, rewards: RewardsConfig = AS_GRADED) -> Stamp:
    """Return the stamp of the last phase: what the policy is trained for, and so what it is evaluated with."""
    return stamp(algorithm, curriculum, _last_phase(curriculum), rewards)


def phases(algorithm: AlgorithmConfig, curriculum: CurriculumConfig, steps: int) -> list[tuple[int, Stamp]]:
    """Return how many of a run's first `steps` belong to each phase that they reach, and its stamp.

    Nobody knows that of a phase that ends by success: it is taken to last as long as it may, and if it may last for
    ever all steps are taken to be of the last one.
    """
    if curriculum.every is None:
        return [(steps, final_stamp(algorithm, curriculum))]
    begins = [phase * curriculum.every for phase in range(_last_phase(curriculum) + 1)]
    ends = [*begins[1:], steps]
    return [
        (min(end, steps) - begin, stamp(algorithm, curriculum, phase))
        for phase, (begin, end) in enumerate(zip(begins, ends, strict=True))
        if begin < steps
    ]


def _shaping(rewards: RewardsConfig, weights: dict[str, float]) -> Shaping | None:
    found = Shaping(weights=weights, long_action=rewards.long_action, once_per_state=rewards.once_per_state)
    return None if found == Shaping() else found


def _last_phase(curriculum: CurriculumConfig) -> int:
    return max(len(curriculum.horizons), len(curriculum.temperatures), len(curriculum.weights), 1) - 1


def _of_phase(values: Sequence[T], phase: int) -> T:
    return values[min(phase, len(values) - 1)]
