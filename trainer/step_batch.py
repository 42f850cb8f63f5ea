"""A decided step -> what the learner trains on: the token sequences of each group, and what each episode earned.

Only groups, samples and configuration enter, so the same step gives the same batch in a run and when it is made again.
A sample without a token record was graded all the same: it is in the baseline, and trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trainer.advantages import Advantages
from trainer.algorithm_config import AlgorithmConfig
from trainer.batching import TokenSequence, sequences
from trainer.gae import Episode, episode_rewards
from trainer.groups import Step
from trainer.terminal import Terminal

_NONE: Advantages = np.asarray(0.0, dtype=np.float32)
"""Of a sample whose advantages the model makes later."""


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """What one trainer step trains on."""

    step: int
    """Number of the step."""
    groups: tuple[tuple[TokenSequence, ...], ...]
    """The sequences of each group, in order."""
    episodes: tuple[Episode, ...] = ()
    """The samples that these are of, in order; only where advantages need the model."""


def step_batch(step: Step, algorithm: AlgorithmConfig, *, lag: Callable[[int], int], vocabulary: int) -> StepBatch:
    """Return the batch of a step.

    Args:
        step: the decision.
        algorithm: what is trained on, and how.
        lag: version -> trainer steps since.
        vocabulary: number of ids that the model knows.

    Raises:
        trainer.batching.UntrainableTranscript: a token record cannot be trained on.
    """
    by_model = algorithm.estimator.needs_model
    advantages = iter(step.advantages or [_NONE] * len(step.terminals))
    groups: list[tuple[TokenSequence, ...]] = []
    episodes: list[Episode] = []
    total = 0
    for group in step.groups:
        own: list[TokenSequence] = []
        for sample, advantage in zip(group.completed, advantages, strict=False):
            found = _of_sample(sample, advantage, algorithm, lag, vocabulary)
            if by_model and found:
                episodes.append(_episode(sample, range(total, total + len(found))))
            own += found
            total += len(found)
        groups.append(tuple(own))
    return StepBatch(step=step.number, groups=tuple(groups), episodes=tuple(episodes))


def _of_sample(
    sample: Terminal, advantage: Advantages, algorithm: AlgorithmConfig, lag: Callable[[int], int], vocabulary: int
) -> list[TokenSequence]:
    if sample.transcript is None:
        return []
    return sequences(
        sample.transcript,
        advantage,
        lag=lag,
        max_lag=algorithm.max_lag,
        vocabulary=vocabulary,
        trained=not (algorithm.overlong_filter and sample.truncated),
        tail=algorithm.estimator.needs_model and algorithm.bootstrap_truncated and sample.truncated,
    )


def _episode(sample: Terminal, indices: range) -> Episode:
    return Episode(
        sequences=tuple(indices),
        rewards=episode_rewards(sample.turn_rewards, sample.reward, sample.turns),
        truncated=sample.truncated,
    )
