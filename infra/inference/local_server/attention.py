"""Attention over a slot cache: all tokens of a step in one row, each attending to its own slot.

The model runs once per step on a batch of shape (1, T): the T new tokens of all running requests one behind the other,
so that the matrix products, which are most of the work, see no padding. Only attention needs to know which token
belongs to whom: transformers lets a function be registered as the attention of a model, and this one writes the new
keys and values into the cache and attends slot by slot, in groups of requests with about equally many new tokens.
A Cache object with a 4-D mask over the padded batch was tried first on paper and rejected: with 8 new tokens in one
row and 1 in the next, most of its products are padding.

Layout: keys and values lie as (slot, position, head, dim), so that writing T tokens is one `index_copy_` and a slot's
prefix is contiguous. This file does not know requests, sampling or weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface

ATTENTION_NAME = "rollmill_slots"
"""The name under which models are loaded to use this attention."""

DENSE_SHARE = 2
"""Attend to a whole range of neighbouring slots, idle ones included, if at least one of this many is wanted: reading
an idle slot in place costs about half of what copying a wanted one together with the others does."""

GROUP_LIMITS = (1, 4, 16, 64, 256, 1024)
"""Requests are grouped for attention by their number of new tokens; a group ends at each of these."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """How large the cache is."""

    layers: int
    slots: int
    max_len: int
    """Positions per slot, tokens."""
    heads: int
    """Key-value heads."""
    dim: int
    """Numbers per head."""

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Return what one slot costs, over all layers."""
        return 2 * self.layers * self.max_len * self.heads * self.dim * dtype.itemsize


class SlotCache:
    """Keys and values of all layers."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype) -> None:
        self.shape = shape
        size = (shape.slots, shape.max_len, shape.heads, shape.dim)
        # calloc'ed pages are zero and cost nothing until touched, unlike torch.zeros, which touches them all.
        self.keys = [_lazy_zeros(size, dtype) for _ in range(shape.layers)]
        self.values = [_lazy_zeros(size, dtype) for _ in range(shape.layers)]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of one slot into another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :length] = tensor[source, :length]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Requests that attend together, padded to the longest of them."""

    slots: torch.Tensor | slice
    """Slots of the R requests: their indices, or a range of neighbours in which the idle ones count as requests too."""
    gather: torch.Tensor
    """For each request and padded place, the token's index in the step, (R * Q,)."""
    width: int
    """Most new tokens of a request."""
    span: int
    """Most positions any request attends to."""
    mask: torch.Tensor
    """What may be attended to, (R, 1, Q, span)."""
    places: torch.Tensor | None
    """Which of the R * Q places are not padding; None if all are real."""
    tokens: torch.Tensor
    """For each real place, the token's index in the step."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward pass: T tokens, whose they are, where they stand."""

    cache: SlotCache
    rows: torch.Tensor
    """Cache rows to write, slot * max_len + position, (T,)."""
    positions: torch.Tensor
    groups: tuple[Group, ...]


def plan(cache: SlotCache, slots: Ints, starts: Ints, counts: Ints) -> Step:
    """Lay out a step: request i adds `counts[i]` tokens to its slot at position `starts[i]`."""
    total = int(counts.sum())
    offsets = np.cumsum(counts) - counts
    positions = np.arange(total) - np.repeat(offsets - starts, counts)
    rows = np.repeat(slots, counts) * cache.shape.max_len + positions
    groups = []
    below = 0
    for limit in (*GROUP_LIMITS, total):
        members = np.flatnonzero((counts > below) & (counts <= limit))
        if members.size:
            groups.append(_group(slots[members], starts[members], counts[members], offsets[members]))
        below = max(below, limit)
    return Step(
        cache=cache,
        rows=torch.from_numpy(rows),
        positions=torch.from_numpy(positions),
        groups=tuple(groups),
    )


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    step: Step,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values, then attend; shapes as transformers has them, (1, heads, T, dim)."""
    layer: int = module.layer_idx  # type: ignore[assignment]  # every attention module of transformers has one
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    keys.view(-1, *keys.shape[2:]).index_copy_(0, step.rows, key[0].transpose(0, 1))
    values.view(-1, *values.shape[2:]).index_copy_(0, step.rows, value[0].transpose(0, 1))
    flat = query[0].transpose(0, 1)  # (T, heads, dim)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    for group in step.groups:
        attended = _attend(flat.index_select(0, group.gather), keys, values, group, scaling)
        if group.places is not None:
            attended = attended.index_select(0, group.places)
        out.index_copy_(0, group.tokens, attended)
    return out.unsqueeze(0), None


def _group(slots: Ints, starts: Ints, counts: Ints, offsets: Ints) -> Group:
    width, span = int(counts.max()), int((starts + counts).max())
    lowest, highest = int(slots.min()), int(slots.max()) + 1
    chosen: torch.Tensor | slice = torch.from_numpy(slots)
    if highest - lowest <= DENSE_SHARE * len(slots):
        chosen = slice(lowest, highest)
        starts, counts, offsets = (
            _spread(values, slots - lowest, highest - lowest) for values in (starts, counts, offsets)
        )
    place = np.arange(width)
    real = place < counts[:, None]
    # Padding repeats the request's last token (an idle slot: its first place): the result is thrown away.
    last = np.minimum(place, np.maximum(counts[:, None] - 1, 0))
    gather = offsets[:, None] + last
    mask = np.arange(span) <= (starts[:, None] + last)[:, :, None]
    return Group(
        slots=chosen,
        gather=torch.from_numpy(gather.reshape(-1)),
        width=width,
        span=span,
        mask=torch.from_numpy(mask).unsqueeze(1),
        places=None if real.all() else torch.from_numpy(np.flatnonzero(real.reshape(-1))),
        tokens=torch.from_numpy(gather[real]),
    )


def _spread(values: Ints, places: Ints, size: int) -> Ints:
    """Return zeros with the values at their places."""
    spread = np.zeros(size, dtype=np.int64)
    spread[places] = values
    return spread


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group, scaling: float | None
) -> torch.Tensor:
    """Attend the group's padded queries (R * Q, heads, dim) to their slots; returns the same shape."""
    requests, heads, dim = len(group.mask), query.shape[1], query.shape[2]
    # (R, Q, heads, dim) -> (R, heads, Q, dim); heads that share keys become further queries of one head.
    query = query.view(requests, group.width, heads, dim).transpose(1, 2)
    shared = heads // keys.shape[2]
    mask = group.mask
    if shared > 1:
        query = query.reshape(requests, keys.shape[2], shared * group.width, dim)
        mask = mask.repeat(1, 1, shared, 1)
    found_keys, found_values = (
        _select(tensor[:, : group.span], group.slots).transpose(1, 2) for tensor in (keys, values)
    )
    out = functional.scaled_dot_product_attention(query, found_keys, found_values, attn_mask=mask, scale=scaling)
    return out.reshape(requests, heads, group.width, dim).transpose(1, 2).reshape(-1, heads, dim)


def _select(tensor: torch.Tensor, slots: torch.Tensor | slice) -> torch.Tensor:
    return tensor[slots] if isinstance(slots, slice) else tensor.index_select(0, slots)


def _lazy_zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    raw = np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)


AttentionInterface.register(ATTENTION_NAME, slot_attention)
