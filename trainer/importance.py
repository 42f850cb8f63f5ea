"""The engine that sampled a token is not the trainer at step start: how that is made into a weight of the token's loss.

    rho_t = pi_old / pi_rollout of one token;   rho = product of rho_t over the trained tokens of a sequence

    token           min(rho_t, cap)                       truncated importance sampling (Yao et al. 2025)
    sequence        min(rho, cap) for all its tokens      the same for the whole sequence
    sequence_mask   rho where rho <= cap, else 0          a sequence that the trainer finds odd is left out
                                                          (Liu et al. 2025, "When speed kills stability": masked IS)
    icepop          rho_t where low <= rho_t <= high,     Ring-1T's IcePop (Ling Team 2025): odd tokens are left out
                    else 0
    off             1

No gradient flows into a weight. A sequence is one token prefix: a sample whose history was rewritten has one rho per
segment. Tokens left out for their lag are no part of a product, and those left out here stay in the denominator of the
loss: what is not trusted counts as having said nothing. This file does not know batches or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from trainer.algorithm_config import AlgorithmConfig, Correction

Tensor = torch.Tensor

LONGEST_LOG = 20.0
"""The log of a product is cut here: exp of it is beyond every cap and still finite."""


@dataclass(frozen=True, kw_only=True)
class ImportanceRule:
    """Which weight, and its bounds."""

    kind: Correction = Correction.TOKEN
    """Which of the five."""
    cap: float = 2.0
    """Largest weight, or largest ratio that is not left out."""
    low: float = 0.5
    """Smallest ratio that IcePop keeps."""
    high: float = 5.0
    """Largest ratio that IcePop keeps."""

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Self:
        """Return the rule that a configuration states; recorded log-probs as the denominator need no weight."""
        low, high = config.icepop
        off = config.old == "rollout" or config.tis_cap == 0
        return cls(kind=Correction.OFF if off else config.correction, cap=config.tis_cap, low=low, high=high)


def importance_weights(old: Tensor, rollout: Tensor, trained: Tensor, rule: ImportanceRule) -> Tensor:
    """Return the weight of each sampled token of one sequence, without gradient, shape (P,).

    Args:
        old: log-probs under the trainer's weights at step start, (P,).
        rollout: log-probs as recorded at sampling, (P,).
        trained: 1.0 where the token is trained on, (P,).
        rule: which weight.
    """
    logs = (old - rollout).detach()
    match rule.kind:
        case Correction.OFF:
            return torch.ones_like(logs)
        case Correction.TOKEN:
            return torch.exp(logs).clamp(max=rule.cap)
        case Correction.ICEPOP:
            ratio = torch.exp(logs)
            return torch.where((ratio >= rule.low) & (ratio <= rule.high), ratio, 0.0)
        case Correction.SEQUENCE | Correction.SEQUENCE_MASK:
            ratio = torch.exp((logs * trained).sum().clamp(-LONGEST_LOG, LONGEST_LOG))
            inside = rule.kind is Correction.SEQUENCE or bool(ratio <= rule.cap)
            return torch.full_like(logs, float(ratio.clamp(max=rule.cap)) if inside else 0.0)
