"""Draws one token per row and reports the log-prob of the distribution it was drawn from.

Order, as in vLLM: temperature, min-p, top-k, top-p. Temperature 0 takes the likeliest token; none of the filters
apply to it and its log-prob is that of the distribution at temperature 1.

A draw is the inverse of the cumulative distribution at a uniform number that depends on (seed, index of the token in
its answer) and on nothing else, so neither the batch nor the order of requests moves it. A generator per request was
rejected: its state would have to be kept, copied and restored, and drawing row by row is slower than the forward pass
of a small model. This file does not know requests, caches or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from schemas.transcript import LogProbs, Sampling, TokenIds

# splitmix64: the increment and the two multipliers of its mixing function.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How the rows of one batch are drawn; row i of the logits belongs to entry i."""

    sampling: Sequence[Sampling]
    """Sampling parameters of each row."""
    seeds: Sequence[int]
    """Seed of each row's request."""
    indices: Sequence[int]
    """How many tokens the row's answer has so far."""


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, index), by hashing both with splitmix64."""
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    # The seed is mixed before the index is added: neighbouring seeds must not walk the same sequence.
    words = _mix(_mix(words) + _GAMMA * (np.array(indices, dtype=np.uint64) + np.uint64(1)))
    # 40 bits are plenty and stay below 1 after rounding in float64 products.
    return (words >> np.uint64(24)).astype(np.float64) / float(1 << 40)


def draw(logits: torch.Tensor, draws: Draws) -> tuple[TokenIds, LogProbs]:
    """Return the drawn ids and their log-probs for logits of shape (rows, vocabulary)."""
    logits = logits.float()
    temperatures = [s.temperature for s in draws.sampling]
    if any(t not in {0.0, 1.0} for t in temperatures):
        logits = logits / torch.tensor([t or 1.0 for t in temperatures]).unsqueeze(1)
    if any(_filters(s) for s in draws.sampling):
        logits = _filtered(logits, draws.sampling)
    logprobs = logits.log_softmax(dim=-1)
    # float64: a float32 sum over a large vocabulary is coarser than the uniform.
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    targets = torch.from_numpy(uniforms(draws.seeds, draws.indices)).unsqueeze(1) * cumulative[:, -1:]
    # right=True: the first id whose cumulative sum exceeds the target, hence never one of probability zero.
    chosen = torch.searchsorted(cumulative, targets, right=True)
    if 0.0 in temperatures:
        greedy = torch.tensor([t == 0.0 for t in temperatures]).unsqueeze(1)
        chosen = torch.where(greedy, logprobs.argmax(dim=-1, keepdim=True), chosen)
    picked = logprobs.gather(1, chosen).squeeze(1)
    return chosen.squeeze(1).numpy().astype(np.int32), picked.numpy()


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _filters(sampling: Sampling) -> bool:
    """Tell whether a row needs min-p, top-k or top-p; greedy rows never do."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)


def _filtered(logits: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """Return the logits with everything outside min-p, top-k and top-p at minus infinity."""
    vocabulary = logits.shape[-1]
    active = [s if _filters(s) else Sampling() for s in sampling]
    probs = logits.softmax(dim=-1)
    floor = torch.tensor([s.min_p for s in active]).unsqueeze(1) * probs.amax(dim=-1, keepdim=True)
    logits = logits.masked_fill(probs < floor, -torch.inf)
    ordered, order = logits.sort(dim=-1, descending=True)
    keep_k = torch.tensor([s.top_k or vocabulary for s in active]).unsqueeze(1)
    beyond_k = torch.arange(vocabulary).unsqueeze(0) >= keep_k
    ordered = ordered.masked_fill(beyond_k, -torch.inf)
    mass = ordered.softmax(dim=-1)
    # A token stays while the mass before it is below top_p, so the likeliest always stays.
    before = mass.cumsum(dim=-1) - mass
    top_p = torch.tensor([s.top_p for s in active]).unsqueeze(1)
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(1, order, ordered)
