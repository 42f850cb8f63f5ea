"""The forward pass: what a causal language model says about the sampled tokens of a micro-batch.

It returns values per sampled token, never per padded position, so losses know no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from infra.errors import ConfigError
from trainer.batching import MicroBatch

Precision = Literal["float32", "bfloat16"]

PROBE = 8
"""Tokens of each of the two sequences that a model is tried with before it is given packed ones."""

SAME = 1e-3
"""Logits that differ by no more than this share of their size are rounded differently and nothing else."""


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
        said = model(input_ids=micro.ids, position_ids=micro.positions, use_cache=False, output_hidden_states=states)
        logits = said.logits[micro.lines, micro.columns]
    logprobs = torch.log_softmax(logits.float() / micro.temperature[:, None], dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    hidden = said.hidden_states[-1] if states else None
    return SampledTokens(
        logprobs=logprobs.gather(1, micro.targets[:, None]).squeeze(1),
        entropy=entropy,
        before=None if hidden is None else hidden[micro.lines, micro.columns].float(),
        ends=None if hidden is None else hidden[micro.end_lines, micro.ends].float(),
    )


def require_apart(model: torch.nn.Module, vocabulary: int, device: str) -> None:
    """Make sure that a model keeps sequences apart that share a row.

    transformers does so for causal models whose attention takes a mask: where positions do not rise by one, it makes
    the mask block-diagonal. A model that reads positions in another way, or has a state beside its attention, would
    train on what follows from a stranger's tokens, and nothing would tell; so it is asked.

    Raises:
        ConfigError: it does not.
    """
    ids = torch.arange(2 * PROBE, device=device) * 7 % vocabulary
    positions = torch.arange(PROBE, device=device).repeat(2)
    with torch.no_grad():
        together = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0, PROBE:]
        alone = model(input_ids=ids[None, PROBE:], use_cache=False).logits[0]
    apart = float((together - alone).abs().max()) / max(float(alone.abs().max()), 1e-6)
    if apart > SAME:
        raise ConfigError(
            f'batching = "packing": this model lets packed sequences see each other (logits differ by {apart:.1%} of '
            f'their size); use batching = "buckets"'
        )
