"""Linear layers whose weights are int8, with a scale for each output channel: a quarter of the memory.

    w[o, i] = s[o] * q[o, i]        s[o] = max |w[o]| / 127,   q = round(w / s),   so |w - s q| <= s / 2
    y[t, o] = s[o] * sum_i x[t, i] * q[o, i] + b[o]

Weights only: x and the sum stay float32, so rounding the weights is all that sets this engine apart from a float32
one, and what a token comes to depends as little on its company as there. At each step the weights are unpacked, one
layer at a time, which the more tokens a step has counts the less beside the products with them.

Products of integers were measured and rejected. With x as int8 too, a language model's log-probs are much further from
those of float32, since a few large values leave a token's others a handful of steps; and where float noise crosses a
step, strangers in the batch change an answer. Several int8 digits for x cure that, and are slower than float32 on
small layers and long prompts. And torch's product is silently wrong on processors without VNNI: its sums of 16 bits
overflow.

Embeddings, norms and the output layer stay float32: a lookup needs float rows, an output layer that is tied to the
embeddings would be stored a second time, and what is lost in it goes straight into the log-probs. So does the
key-value cache. This file does not know files, requests or versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from infra.inference.base import PolicyRefused

LARGEST = 127
"""Largest integer of a weight: -128 would have no opposite."""


class Int8Linear(nn.Module):
    """A linear layer without gradient; takes and gives float32."""

    weight: torch.Tensor
    """q, (out, in), int8."""
    scale: torch.Tensor
    """s, (out,), float32."""
    bias: torch.Tensor | None
    """b, (out,), float32."""

    def __init__(self, layer: nn.Linear) -> None:
        """Take the place of a layer.

        Args:
            layer: its weights are finite.
        """
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("weight", torch.empty(layer.weight.shape, dtype=torch.int8))
        # Outside the state, whose names and shapes stay those of the float model: new weights are compared with them.
        self.register_buffer("scale", torch.empty(layer.out_features), persistent=False)
        self.register_parameter("bias", layer.bias)
        self.put(layer.weight.detach(), channel_scales(layer.weight.detach()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return y for x of shape (..., in), as (..., out)."""
        # The scales come after the sum: there are fewer outputs than weights.
        out = functional.linear(values, self.weight.float()).mul_(self.scale)
        return out if self.bias is None else out.add_(self.bias)

    @torch.no_grad()
    def put(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Put float weights in place, (out, in), with the scales that `channel_scales` found, (out,)."""
        # A channel whose largest weight is too small for a scale is all zero, whatever it is divided by.
        divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(1)
        self.weight.copy_((weight.float() / divisor).round_().clamp_(-LARGEST, LARGEST))
        self.scale.copy_(scale)


def channel_scales(weight: torch.Tensor) -> torch.Tensor:
    """Return s of weights (out, in), as (out,) in float32: 0 for a channel of zeros, not finite if a weight is not."""
    return weight.abs().amax(dim=1).float() / LARGEST


def quantise(model: nn.Module) -> None:
    """Put int8 layers in the place of a float32 model's linear ones, one after the other, but for the output layer.

    Raises:
        PolicyRefused: other matrices would stay float32, or a weight is not finite; nothing was changed.
    """
    output = _output(model)
    layers = {name: each for name, each in model.named_modules() if type(each) is nn.Linear and each is not output}
    _require_linear(model, layers)
    _require_finite({f"{name}.weight": channel_scales(layer.weight) for name, layer in layers.items()})
    for name, layer in layers.items():
        model.set_submodule(name, Int8Linear(layer))


def int8_layers(model: nn.Module) -> dict[str, Int8Linear]:
    """Return weight name -> int8 layer; nothing for a float model."""
    return {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, Int8Linear)}


def _require_finite(scales: Mapping[str, torch.Tensor]) -> None:
    """Raise PolicyRefused if scales say that a weight is not finite: as an integer it would pass for a number."""
    if broken := [name for name, scale in scales.items() if not bool(scale.isfinite().all())]:
        raise PolicyRefused(
            f"{broken[0]} ({len(broken)} of {len(scales)} linear layers) holds weights that are infinite or not a "
            "number, and int8 has neither; nothing was changed. These weights are broken: publish sound ones"
        )


def _require_linear(model: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Raise PolicyRefused if matrices that are neither embeddings nor the output layer would stay float."""
    output = _output(model)
    kept = (each for each in model.modules() if isinstance(each, nn.Embedding) or each is output)
    known = {id(each.weight) for each in (*layers.values(), *kept)}
    others = [name for name, value in model.named_parameters() if value.dim() > 1 and id(value) not in known]
    if others or not layers:
        raise PolicyRefused(
            f"int8 is of linear layers, and {type(model).__name__} has "
            f"{f'weights elsewhere, such as {others[0]}' if others else 'none'}: serve it as float32 or bfloat16"
        )


def _output(model: Any) -> nn.Module | None:
    """Return the layer that makes logits."""
    found: nn.Module | None = model.get_output_embeddings()
    return found
