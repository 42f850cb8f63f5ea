"""The policy-gradient loss over sampled tokens, as DAPO states it; every vector has one entry per token, shape (P,).

    ratio     = pi_theta / pi_old                                 pi_old: the trainer's weights at step start
    objective = min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)            clip-higher (Yu et al. 2025)
    objective = max(objective, c * A) where A < 0                             dual clip, off unless asked for
    loss      = -sum(share * weight * objective) / N  +  k * sum(share * KL) / N  -  e * sum(share * entropy) / N

`weight` is the correction between engine and trainer (`importance.py`). At token level a trained token's share is 1 and
N the number of trained tokens of the whole mini-batch, never of a micro-batch: the sum over micro-batches is then the
mini-batch's loss, and no mean of means is taken. At sample level its share is 1 / (trained tokens of its sample) and N
the number of samples with trained tokens. Nothing here knows models, padding or groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class LossRules:
    """The coefficients."""

    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = None
    """Bound c of the dual clip."""
    kl: float = 0.0
    """Weight of the KL term."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term."""
    entropy: float = 0.0
    """Weight of the entropy term."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Sampled tokens and what is known of each."""

    logprobs: Tensor
    """Under the weights that are trained, with gradient, float32."""
    old: Tensor
    """Under the weights at step start."""
    advantages: Tensor
    """Of the token."""
    weight: Tensor
    """Correction between engine and trainer, without gradient."""
    share: Tensor
    """What the token counts in the loss; 0.0 where it is not trained on."""
    reference: Tensor | None = None
    """Under the reference; only for the KL term."""
    entropy: Tensor | None = None
    """Of the distribution that the token was drawn from, with gradient, nats; only for the entropy term."""


@dataclass(frozen=True, kw_only=True)
class LossParts:
    """The loss and what to know about it; sums over the given tokens, so that micro-batches add up."""

    loss: Tensor
    """Scalar with gradient, already divided by the mini-batch's denominator."""
    trained: float
    """Trained tokens."""
    clipped: float
    """Trained tokens whose gradient the clip removed."""
    kl: float
    """Sum of the KL estimates."""
    weight: float
    """Sum of importance weights over trained tokens."""
    distrusted: float
    """Trained tokens whose weight is 0: engine and trainer differ too much."""


def policy_loss(tokens: TokenBatch, rules: LossRules, denominator: float) -> LossParts:
    """Return the loss of some tokens of a mini-batch.

    Args:
        tokens: all or some of the mini-batch.
        rules: the coefficients.
        denominator: sum of the shares of the whole mini-batch.
    """
    trained = (tokens.share > 0).float()
    ratio = torch.exp(tokens.logprobs - tokens.old)
    objective = clipped_objective(ratio, tokens.advantages, rules)
    loss = -(tokens.share * tokens.weight * objective).sum() / denominator
    kl = 0.0
    if tokens.reference is not None:
        estimate = kl_estimate(tokens.logprobs, tokens.reference, rules.kl_kind)
        loss = loss + rules.kl * (tokens.share * estimate).sum() / denominator
        kl = float((trained * estimate).sum().detach())
    if tokens.entropy is not None:
        loss = loss - rules.entropy * (tokens.share * tokens.entropy).sum() / denominator
    gone = (objective.detach() != (ratio * tokens.advantages).detach()) * trained
    return LossParts(
        loss=loss,
        trained=float(trained.sum()),
        clipped=float(gone.sum()),
        kl=kl,
        weight=float((tokens.weight * trained).sum()),
        distrusted=float(((tokens.weight == 0) * trained).sum()),
    )


def clipped_objective(ratio: Tensor, advantages: Tensor, rules: LossRules) -> Tensor:
    """Return min(ratio * A, clip(ratio) * A), with the dual clip where it is on."""
    clipped = torch.clamp(ratio, 1.0 - rules.clip_low, 1.0 + rules.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if rules.dual_clip is None:
        return objective
    return torch.where(advantages < 0, torch.maximum(objective, rules.dual_clip * advantages), objective)


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Return an estimate of KL(pi_theta || reference) per token (Schulman, "Approximating KL divergence")."""
    difference = reference - logprobs
    match kind:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.exp(difference) - difference - 1
