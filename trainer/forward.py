"""The forward pass: what a causal language model says about the sampled tokens of a micro-batch.

It returns values per sampled token, never per padded position, so losses know no padding.
"""

from __future__ import annotations

import torch

from trainer.batching import MicroBatch


def sampled_logprobs(model: torch.nn.Module, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-prob, entropy) of each sampled token under a model, at the temperature it was drawn at, (P,) each.

    Only the rows of the logits that predict a sampled token are kept; observations are most of a transcript.
    """
    logits = model(input_ids=micro.ids, use_cache=False).logits[micro.rows, micro.columns].float()
    logprobs = torch.log_softmax(logits / micro.temperature[:, None], dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(1, micro.targets[:, None]).squeeze(1), entropy
