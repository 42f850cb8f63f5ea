"""What changes with the trainer's steps: the horizon and the temperature that groups are stamped with at admission.

    stage = min(steps made // every, stages - 1)

Steps 0 to every - 1 are the first stage, and the last one stays: ScalingInter-RL (Xi et al. 2025) lets the horizon grow
like this. A schedule that is not given is the constant of `algorithm`. Pure: what is stamped follows from the
configuration, which `TrainerStarted` carries, and the number of steps, so it needs no record of its own. Siblings
share what was stamped on their group; groups that are on their way when a stage begins keep the stage before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainer.config import AlgorithmConfig, CurriculumConfig

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What a group is sampled with."""

    horizon: int
    """Most turns of an episode."""
    temperature: float
    """Sampling temperature."""


def stamp(algorithm: AlgorithmConfig, curriculum: CurriculumConfig, step: int) -> Stamp:
    """Return what groups are stamped with that are admitted after so many trainer steps."""
    stage = step // curriculum.every if curriculum.every else 0
    return Stamp(
        horizon=_of_stage(curriculum.horizons or (algorithm.horizon,), stage),
        temperature=_of_stage(curriculum.temperatures or (algorithm.temperature,), stage),
    )


def final_stamp(algorithm: AlgorithmConfig, curriculum: CurriculumConfig) -> Stamp:
    """Return the stamp of the last stage: what the policy is trained for, and so what it is evaluated with."""
    return stamp(algorithm, curriculum, _last_stage(curriculum) * (curriculum.every or 0))


def stages(algorithm: AlgorithmConfig, curriculum: CurriculumConfig, steps: int) -> list[tuple[int, Stamp]]:
    """Return how many of a run's first `steps` belong to each stage that they reach, and its stamp."""
    if curriculum.every is None:
        return [(steps, stamp(algorithm, curriculum, 0))]
    begins = [stage * curriculum.every for stage in range(_last_stage(curriculum) + 1)]
    ends = [*begins[1:], steps]
    return [
        (min(end, steps) - begin, stamp(algorithm, curriculum, begin))
        for begin, end in zip(begins, ends, strict=True)
        if begin < steps
    ]


def _last_stage(curriculum: CurriculumConfig) -> int:
    return max(len(curriculum.horizons), len(curriculum.temperatures), 1) - 1


def _of_stage(values: Sequence[T], stage: int) -> T:
    return values[min(stage, len(values) - 1)]
