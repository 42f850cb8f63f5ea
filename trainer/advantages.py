"""Rewards of siblings -> advantages, as in the papers; numpy only, so that replay needs no torch.

    GRPO, DAPO   A_i = (R_i - mean(R)) / (std(R) + 1e-6), unbiased std      (Shao et al. 2024; Yu et al. 2025)
    Dr. GRPO     A_i =  R_i - mean(R)                                       (Liu et al. 2025)
    RLOO         A_i =  R_i - mean of the other R_j                         (Ahmadian et al. 2024)

Computed in float64 and rounded once to float32: that rounding is what the digest is over. A group without variance
gives exact zeros, not rounding noise blown up by the small denominator. Only completed siblings are given to these
functions; which ones those are is decided in `groups.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer.config import Estimator, Overlong

Advantages = npt.NDArray[np.float32]

EPSILON = 1e-6
"""Keeps the division by a small standard deviation finite."""


def advantages(rewards: Sequence[float], estimator: Estimator, *, std: bool) -> Advantages:
    """Return one advantage per sibling of a group, float32, shape (siblings,)."""
    match estimator:
        case Estimator.GRPO:
            return grpo(rewards, std=std)
        case Estimator.RLOO:
            return rloo(rewards)


def grpo(rewards: Sequence[float], *, std: bool = True) -> Advantages:
    """Return reward less the group's mean, divided by its unbiased standard deviation unless `std` is off."""
    values = np.asarray(rewards, dtype=np.float64)
    if _flat(values):
        return np.zeros(len(values), dtype=np.float32)
    centred = values - values.mean()
    scale = values.std(ddof=1) + EPSILON if std else 1.0
    return np.asarray(centred / scale, dtype=np.float32)


def rloo(rewards: Sequence[float]) -> Advantages:
    """Return reward less the mean of the other siblings; a single sibling has no baseline and gets 0."""
    values = np.asarray(rewards, dtype=np.float64)
    if _flat(values):
        return np.zeros(len(values), dtype=np.float32)
    others = (values.sum() - values) / (len(values) - 1)
    return np.asarray(values - others, dtype=np.float32)


def soft_overlong(sampled_tokens: int, rule: Overlong | None) -> float:
    """Return the punishment of a long episode: 0, then linear to -1 at `max_tokens` (DAPO, equation 13)."""
    if rule is None:
        return 0.0
    excess = sampled_tokens - (rule.max_tokens - rule.cache_tokens)
    return -min(max(excess / rule.cache_tokens, 0.0), 1.0)


def advantage_digest(values: Advantages) -> str:
    """Return the SHA-256 over float32 little-endian advantages."""
    return hashlib.sha256(np.asarray(values, dtype="<f4").tobytes()).hexdigest()


def _flat(values: npt.NDArray[np.float64]) -> bool:
    return len(values) < 2 or bool(values.max() == values.min())
