"""Rewards of siblings -> advantages, as in the papers; numpy only, so that replay needs no torch.

    GRPO, DAPO   A_i = (R_i - mean(R)) / (std(R) + 1e-6), unbiased std      (Shao et al. 2024; Yu et al. 2025)
    Dr. GRPO     A_i =  R_i - mean(R)                                       (Liu et al. 2025)
    RLOO         A_i =  R_i - mean of the other R_j                         (Ahmadian et al. 2024)
    REINFORCE++  A_i = (R_i - mean(R)) / (std(R) + 1e-6), over the step     (Hu et al. 2025)

The first three look at one group, REINFORCE++ at all samples of a step: its peers are the step's. Its paper leaves open
what the mean is over; common code takes every token of the batch, so that a long answer weighs more. Here a sample
counts once, as in every other statistic. Its per-token KL penalty is the KL term of the loss.

With process rewards a sample has one advantage per turn, for any of these (`r` = process rewards, `A` = as above):

    G_it = sum of r_iu over u >= t        return-to-go, undiscounted
    A_it = (G_it - mean(G)) / (std(G) + 1e-6) + A_i        mean and std over all turns of all peers

A sibling without process rewards in a group that has some earned 0 in each turn. Leaving the own turns out of the
mean, as RLOO does for outcomes, has no one meaning for returns that depend on each other: it is the same here.

Computed in float64 and rounded once to float32: that rounding is what the digest is over. Peers without variance
give exact zeros, not rounding noise blown up by the small denominator. Only completed siblings are given to these
functions; which ones those are is decided in `groups.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.algorithm_config import Estimator, Overlong

Advantages = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

EPSILON = 1e-6
"""Keeps the division by a small standard deviation finite."""


class Graded(Protocol):
    """What an advantage is made from."""

    @property
    def reward(self) -> float:
        """Shaped reward of the sample."""
        ...

    @property
    def turns(self) -> int:
        """Turns of its episode."""
        ...

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Process reward of each turn, or none."""
        ...


def step_advantages(groups: Sequence[Sequence[Graded]], estimator: Estimator, *, std: bool) -> tuple[Advantages, ...]:
    """Return the advantage of each sample of a step, in order: one number, shape (), or one per turn, (turns,).

    Nothing where they need the model: `gae.py` makes them then, from its values.

    Args:
        groups: the graded siblings of each group.
        estimator: how rewards become advantages.
        std: divide by the standard deviation, where the estimator knows one.
    """
    if estimator.needs_model:
        return ()
    pools = [list(chain.from_iterable(groups))] if estimator is Estimator.REINFORCE_PLUS_PLUS else groups
    return tuple(advantage for pool in pools for advantage in _of_peers(pool, estimator, std=std))


def _of_peers(peers: Sequence[Graded], estimator: Estimator, *, std: bool) -> list[Advantages]:
    outcome = outcome_advantages([peer.reward for peer in peers], estimator, std=std)
    if not any(peer.turn_rewards for peer in peers):
        return [_rounded(value) for value in outcome]
    process = process_advantages([peer.turn_rewards or (0.0,) * peer.turns for peer in peers], std=std)
    return [_rounded(of_turns + value) for of_turns, value in zip(process, outcome, strict=True)]


def outcome_advantages(rewards: Sequence[float], estimator: Estimator, *, std: bool) -> Doubles:
    """Return one advantage per peer, shape (peers,): a group's siblings, or a step's samples for REINFORCE++."""
    match estimator:
        case Estimator.GRPO | Estimator.REINFORCE_PLUS_PLUS:
            return normalised(rewards, std=std)
        case Estimator.RLOO:
            return rloo(rewards)
        case Estimator.GAE:
            raise ValueError("rewards alone do not make these advantages: a value head has to see the tokens")


def process_advantages(turn_rewards: Sequence[Sequence[float]], *, std: bool) -> list[Doubles]:
    """Return the normalised return-to-go of each turn of each peer, (turns,) each."""
    to_go = [np.cumsum(np.asarray(rewards, dtype=np.float64)[::-1])[::-1] for rewards in turn_rewards]
    together = normalised(np.concatenate(to_go), std=std)
    return np.split(together, np.cumsum([len(found) for found in to_go])[:-1])


def normalised(values: npt.ArrayLike, *, std: bool = True) -> Doubles:
    """Return values less their mean, divided by their unbiased standard deviation unless `std` is off."""
    found = np.asarray(values, dtype=np.float64)
    if _flat(found):
        return np.zeros(len(found))
    centred = found - found.mean()
    scale = found.std(ddof=1) + EPSILON if std else 1.0
    return np.asarray(centred / scale)


def rloo(rewards: npt.ArrayLike) -> Doubles:
    """Return reward less the mean of the other siblings; a single sibling has no baseline and gets 0."""
    values = np.asarray(rewards, dtype=np.float64)
    if _flat(values):
        return np.zeros(len(values))
    others = (values.sum() - values) / (len(values) - 1)
    return np.asarray(values - others)


def soft_overlong(sampled_tokens: int, rule: Overlong | None) -> float:
    """Return the punishment of a long episode: 0, then linear to -1 at `max_tokens` (DAPO, equation 13)."""
    if rule is None:
        return 0.0
    excess = sampled_tokens - (rule.max_tokens - rule.cache_tokens)
    return -min(max(excess / rule.cache_tokens, 0.0), 1.0)


def advantage_digest(values: Sequence[Advantages]) -> str:
    """Return the SHA-256 over the float32 little-endian advantages of a step's samples; empty if there are none."""
    if not len(values):
        return ""
    return hashlib.sha256(b"".join(np.asarray(value, dtype="<f4").tobytes() for value in values)).hexdigest()


def _rounded(values: npt.ArrayLike) -> Advantages:
    return np.asarray(values, dtype=np.float32)


def _flat(values: Doubles) -> bool:
    return len(values) < 2 or bool(values.max() == values.min())
