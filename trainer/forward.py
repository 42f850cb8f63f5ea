"""The forward pass: what a causal language model says about the sampled tokens of a micro-batch.

It returns values per sampled token, never per padded position, so losses know no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from trainer.batching import MicroBatch

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, eq=False, kw_only=True)
class SampledTokens:
    """What a model says about P sampled tokens in B sequences; float32 whatever its arithmetic."""

    logprobs: torch.Tensor
    """Log-prob at the temperature each was drawn at, (P,)."""
    entropy: torch.Tensor
    """Of the distribution that each was drawn from, nats, (P,)."""
    before: torch.Tensor | None
    """Last hidden state of the position before each, (P, H); only if asked for."""
    ends: torch.Tensor | None
    """Last hidden state of the last token of each sequence, (B, H); only if asked for."""


def sampled_logprobs(
    model: torch.nn.Module, micro: MicroBatch, *, entropy_gradient: bool = False, precision: Precision = "float32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-prob, entropy) of each sampled token under a model; otherwise as `sampled_tokens`."""
    found = sampled_tokens(model, micro, entropy_gradient=entropy_gradient, precision=precision)
    return found.logprobs, found.entropy


def sampled_tokens(
    model: torch.nn.Module,
    micro: MicroBatch,
    *,
    entropy_gradient: bool = False,
    precision: Precision = "float32",
    states: bool = False,
) -> SampledTokens:
    """Return what a model says about each sampled token.

    Only the rows of the logits that predict a sampled token are kept; observations are most of a transcript.

    Args:
        model: the model.
        micro: the tokens.
        entropy_gradient: let a gradient flow into the entropy too.
        precision: arithmetic of the model.
        states: return hidden states too.
    """
    with torch.autocast(micro.ids.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        said = model(input_ids=micro.ids, use_cache=False, output_hidden_states=states)
        logits = said.logits[micro.rows, micro.columns]
    logprobs = torch.log_softmax(logits.float() / micro.temperature[:, None], dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    hidden = said.hidden_states[-1] if states else None
    return SampledTokens(
        logprobs=logprobs.gather(1, micro.targets[:, None]).squeeze(1),
        entropy=entropy,
        before=None if hidden is None else hidden[micro.rows, micro.columns].float(),
        ends=None if hidden is None else hidden[torch.arange(len(hidden), device=hidden.device), micro.ends].float(),
    )
