"""How many groups may be on their way: the trainer's only grip on the feeder.

    admit_up_to = resolved + (max_lag + 1) * groups

A dropped group is resolved at its decision, a trained one once its version is announced. So at most `max_lag` whole
batches are sampled ahead of the weights they will train, a dropped group is replaced at once, and a synchronous run
(max_lag = 0) admits nothing before the weights that shall sample it are there.

What is admitted is sampled by weights of the step `max_lag` before the present one, or by newer ones; where steps wait
for late groups (`pacing.py`), by the newest, so that a group's age is counted from its admission.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas.control import Credit
from trainer.algorithm_config import AlgorithmConfig, Late
from trainer.config import CurriculumConfig, RewardsConfig
from trainer.curriculum import AS_GRADED, phase_after, stamp
from trainer.rules import CONSTANT


def credit(
    run: str,
    epoch: int,
    algorithm: AlgorithmConfig,
    *,
    resolved: int,
    step: int,
    versions: Mapping[int, int],
    curriculum: CurriculumConfig = CONSTANT,
    rewards: RewardsConfig = AS_GRADED,
    phase: int | None = None,
    decided: int = -1,
    lowest_version: int = 0,
    closed: bool = False,
) -> Credit:
    """Return what the feeder may do now.

    Args:
        run: the run.
        epoch: the trainer's epoch.
        algorithm: batch size, lag and what is stamped at admission.
        resolved: admitted groups that are decided, and if trained, announced.
        step: steps made.
        versions: version -> step that made it.
        curriculum: what is stamped, where that changes.
        rewards: how much the parts of a reward count.
        phase: of the curriculum, where that does not follow from the number of steps.
        decided: offset of the trainer's last decision.
        lowest_version: what sampled before it is of a line that was left.
        closed: no more groups are wanted.
    """
    phase = phase_after(curriculum, step) if phase is None else phase
    stamped = stamp(algorithm, curriculum, phase, rewards)
    oldest = step if algorithm.late is Late.WAIT else max(0, step - algorithm.max_lag)
    return Credit(
        run=run,
        epoch=epoch,
        admit_up_to=resolved + (algorithm.max_lag + 1) * algorithm.groups,
        # The newest version of the oldest step that may still sample: a version that was made again has a new number.
        min_version=max([lowest_version, *(version for version, made_by in versions.items() if made_by == oldest)]),
        horizon=stamped.horizon,
        temperature=stamped.temperature,
        closed=closed,
        phase=phase,
        shaping=stamped.shaping,
        decided=decided,
    )
