"""A step's batch made up for the learner, and the small model that it is for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trainer.batching import TokenSequence
from trainer.gae import Episode
from trainer.models import Shape, create_wordlevel_model
from trainer.step_batch import StepBatch

VOCABULARY = 20

SHAPE = Shape(hidden=16, layers=2, heads=2, intermediate=32, context=64)
"""A few thousand parameters."""


def create_model(directory):
    """Write a model directory of `VOCABULARY` words and return it."""
    create_wordlevel_model(directory, seed=0, words=[f"w{i}" for i in range(VOCABULARY - 7)], shape=SHAPE)
    return directory


def batch(step=1, *, groups=4, siblings=3):
    """Return episodes of one to three turns, each with two sampled tokens behind a prompt of two; the step is the seed.

    Each has an advantage, for estimators that need no model, and rewards, for those that do.
    """
    draw = np.random.default_rng(step)
    made, episodes = [], []
    for group in range(groups):
        turns = [int(draw.integers(1, 4)) for _ in range(siblings)]
        made.append(tuple(_sequence(draw, count) for count in turns))
        episodes += [
            Episode(
                sequences=(group * siblings + number,),
                rewards=tuple(float(r) for r in draw.normal(0, 1, count)),
                truncated=number == 1,
            )
            for number, count in enumerate(turns)
        ]
    return StepBatch(step=step, groups=tuple(made), episodes=tuple(episodes))


def half_sampled(draw, length):
    """Return a sequence of which about half was sampled, and one token at least."""
    positions = np.flatnonzero(draw.random(length - 1) < 0.5).astype(np.int64) + 1
    return _made_up(draw, length, positions if len(positions) else np.array([1]))


def _sequence(draw, turns):
    positions = np.flatnonzero(np.arange(4 * turns) % 4 >= 2)
    return replace(_made_up(draw, 4 * turns, positions), turns=np.repeat(np.arange(turns), 2))


def _made_up(draw, length, positions):
    count = len(positions)
    return TokenSequence(
        tokens=draw.integers(0, VOCABULARY, length),
        positions=positions,
        rollout=draw.normal(-3, 0.2, count).astype(np.float32),
        temperature=np.full(count, 0.7, dtype=np.float32),
        lag=np.zeros(count, dtype=np.int64),
        trained=(draw.random(count) < 0.9).astype(np.float32),
        advantage=float(draw.normal()),
    )
