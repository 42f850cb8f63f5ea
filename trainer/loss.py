"""The policy-gradient loss over sampled tokens, as DAPO states it; every vector has one entry per token, shape (P,).

    ratio     = pi_theta / pi_old                                 pi_old: the trainer's weights at step start
    objective = min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)            clip-higher (Yu et al. 2025)
    objective = max(objective, c * A) where A < 0                             dual clip, off unless asked for
    weight    = min(pi_old / pi_rollout, cap), detached                       token-level truncated importance sampling
    loss      = -sum(mask * weight * objective) / N  +  k * sum(mask * KL) / N

N is the number of trained tokens of the whole mini-batch, never of a micro-batch: the sum over micro-batches is then
the mini-batch's loss, and no mean of means is taken. Nothing here knows models, padding or groups.
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
    tis_cap: float = 2.0
    """Cap of the importance weight; 0 turns it off."""
    kl: float = 0.0
    """Weight of the KL term."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Sampled tokens and what is known of each."""

    logprobs: Tensor
    """Under the weights that are trained, with gradient, float32."""
    old: Tensor
    """Under the weights at step start."""
    rollout: Tensor
    """As recorded at sampling."""
    advantages: Tensor
    """Of the token's sample."""
    mask: Tensor
    """1.0 where the token is trained on, else 0.0."""
    reference: Tensor | None = None
    """Under the model the run began with; only for the KL term."""


@dataclass(frozen=True, kw_only=True)
class LossParts:
    """The loss and what to know about it; sums over the given tokens, so that micro-batches add up."""

    loss: Tensor
    """Scalar with gradient, already divided by the mini-batch's token count."""
    clipped: float
    """Trained tokens whose gradient the clip removed."""
    kl: float
    """Sum of the KL estimates."""
    weight: float
    """Sum of importance weights over trained tokens."""


def policy_loss(tokens: TokenBatch, rules: LossRules, denominator: float) -> LossParts:
    """Return the loss of some tokens of a mini-batch.

    Args:
        tokens: all or some of the mini-batch.
        rules: the coefficients.
        denominator: trained tokens of the whole mini-batch.
    """
    ratio = torch.exp(tokens.logprobs - tokens.old)
    objective = clipped_objective(ratio, tokens.advantages, rules)
    weight = importance_weight(tokens.old, tokens.rollout, rules.tis_cap)
    loss = -(tokens.mask * weight * objective).sum() / denominator
    kl = torch.zeros(())
    if tokens.reference is not None:
        kl = (tokens.mask * kl_estimate(tokens.logprobs, tokens.reference, rules.kl_kind)).sum()
        loss = loss + rules.kl * kl / denominator
    gone = (objective.detach() != (ratio * tokens.advantages).detach()) * tokens.mask
    return LossParts(
        loss=loss,
        clipped=float(gone.sum()),
        kl=float(kl.detach()),
        weight=float((weight * tokens.mask).sum()),
    )


def clipped_objective(ratio: Tensor, advantages: Tensor, rules: LossRules) -> Tensor:
    """Return min(ratio * A, clip(ratio) * A), with the dual clip where it is on."""
    clipped = torch.clamp(ratio, 1.0 - rules.clip_low, 1.0 + rules.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if rules.dual_clip is None:
        return objective
    return torch.where(advantages < 0, torch.maximum(objective, rules.dual_clip * advantages), objective)


def importance_weight(old: Tensor, rollout: Tensor, cap: float) -> Tensor:
    """Return min(pi_old / pi_rollout, cap) without gradient; all ones when the cap is 0."""
    if cap == 0:
        return torch.ones_like(old)
    return torch.exp(old - rollout).clamp(max=cap).detach()


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
