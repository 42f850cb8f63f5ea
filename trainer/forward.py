"""The forward pass: what a causal language model says about the sampled tokens of a micro-batch.

It returns values per sampled token, never per padded position, so losses know no padding.
"""

from __future__ import annotations

from typing import Literal

import torch

from trainer.batching import MicroBatch


def sampled_logprobs(
    model: torch.nn.Module,
    micro: MicroBatch,
    *,
    entropy_gradient: bool = False,
    precision: Literal["float32", "bfloat16"] = "float32",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-prob, entropy) of each sampled token under a model, at the temperature it was drawn at, (P,) each.

    Only the rows of the logits that predict a sampled token are kept; observations are most of a transcript. Both are
    computed in float32 whatever the model's arithmetic.

    Args:
        model: the model.
        micro: the tokens.
        entropy_gradient: let a gradient flow into the entropy too.
        precision: arithmetic of the model.
    """
    with torch.autocast(micro.ids.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(input_ids=micro.ids, use_cache=False).logits[micro.rows, micro.columns]
    logprobs = torch.log_softmax(logits.float() / micro.temperature[:, None], dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(1, micro.targets[:, None]).squeeze(1), entropy
