"""What a trainer step was like: running totals while it is made, and the figures that are left of them.

This file does not know models: it counts what the learner tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from trainer.batching import TokenSequence
from trainer.loss import LossParts
from trainer.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one trainer step was like; per-token means are over trained tokens."""

    loss: float = 0.0
    """Mean loss of the mini-batches."""
    grad_norm: float = 0.0
    """Mean norm of the gradient before clipping."""
    entropy: float = 0.0
    """Entropy of the policy at step start, nats per sampled token."""
    clip_share: float = 0.0
    """Share of trained tokens whose gradient the clip removed."""
    kl: float = 0.0
    """KL to the reference, nats per token; 0 when the term is off."""
    weight: float = 1.0
    """Mean importance weight between trainer and engine."""
    distrusted_share: float = 0.0
    """Share of trained tokens with weight 0: engine and trainer differ too much."""
    learning_rate: float = 0.0
    """Of the last optimizer step."""
    entropy_weight: float = 0.0
    """Weight of the entropy term in this step; above 0 only below the floor."""
    mismatch: float = 0.0
    """Mean |log pi_trainer - log pi_engine| of tokens at lag 0, nats: numerics, not staleness."""
    lag_mean: float = 0.0
    """Mean lag of sampled tokens, trainer steps."""
    lag_max: int = 0
    """Largest lag of a trained token, trainer steps."""
    tokens: int = 0
    """Sampled tokens in the batch."""
    masked_share: float = 0.0
    """Share of them left out: for their lag, or because their episode was cut off."""
    repetition: float = 0.0
    """Mean share of an episode's n-grams of sampled tokens that occurred in it before."""
    unearned: float | None = None
    """Mean reward of the samples that failed, process rewards included; none if none failed."""
    value_loss: float = 0.0
    """Mean loss of the value head, before its coefficient; 0 without one."""
    value_explained: float = 0.0
    """Share of the variance of returns that the values at step start explain; 0 without a value head."""
    optimizer_steps: int = 0
    """Optimizer steps made in all."""


@dataclass
class StepSums:
    """Running totals of a trainer step."""

    learning_rate: float = 0.0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    value_losses: list[float] = field(default_factory=list)
    trained: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    weight: float = 0.0
    distrusted: float = 0.0

    def add(self, parts: LossParts) -> None:
        """Count some tokens of a mini-batch."""
        self.trained += parts.trained
        self.distrusted += parts.distrusted
        self.clipped += parts.clipped
        self.kl += parts.kl
        self.weight += parts.weight

    def over(self, ranks: Ranks) -> None:
        """Add what other ranks have counted; norm and rate are the same for all."""
        own = [self.trained, self.clipped, self.kl, self.weight, self.distrusted, *self.losses, *self.value_losses]
        self.trained, self.clipped, self.kl, self.weight, self.distrusted, *rest = ranks.sum(own)
        self.losses, self.value_losses = rest[: len(self.losses)], rest[len(self.losses) :]

    def per_token(self, total: float) -> float:
        """Return the mean over trained tokens."""
        return total / self.trained if self.trained else 0.0


@dataclass(frozen=True, kw_only=True)
class TokenFigures:
    """What the sampled tokens of a step are like; `StepMetrics` says what each is."""

    mismatch: float
    lag_mean: float
    lag_max: int
    count: int
    masked_share: float

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], now: Sequence[torch.Tensor]) -> Self:
        """Return the figures of sequences whose tokens have these log-probs at step start."""
        lags = np.concatenate([s.lag for s in sequences]) if sequences else np.zeros(0)
        trained = np.concatenate([s.trained for s in sequences]) if sequences else np.zeros(0)
        fresh = [np.abs(o.cpu().numpy() - s.rollout)[s.lag == 0] for s, o in zip(sequences, now, strict=True)]
        differences = np.concatenate(fresh) if fresh else np.zeros(0)
        return cls(
            mismatch=float(differences.mean()) if len(differences) else 0.0,
            lag_mean=float(lags[trained > 0].mean()) if trained.any() else 0.0,
            lag_max=int(lags[trained > 0].max()) if trained.any() else 0,
            count=len(lags),
            masked_share=float(1 - trained.mean()) if len(lags) else 0.0,
        )
