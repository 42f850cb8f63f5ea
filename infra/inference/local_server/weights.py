"""Reads a model directory for the engine, and puts new weights into a model that is already there.

A swap is all or nothing: every tensor is read and compared by name and shape before the first one is copied. Files
hold floats, whatever the model computes in: an int8 layer makes its own of them. This file does not know when a swap
is allowed; `engine.py` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from infra.inference.base import ModelPathMissing, NumberFormat, PolicyRefused
from infra.inference.local_server.attention import ATTENTION_NAME, CacheShape
from infra.inference.local_server.int8 import channel_scales, int8_layers, quantise
from infra.inference.weight_files import WEIGHTS_FILE, files

DTYPES: dict[NumberFormat, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
"""Number formats by name; int8 is that of linear layers alone (`int8.py`)."""


def dtype_named(name: str) -> torch.dtype:
    """Return a number format by its name.

    Raises:
        PolicyRefused: there is none of that name.
    """
    for known, dtype in DTYPES.items():
        if name == known:
            return dtype
    raise PolicyRefused(f"dtype {name!r} is none of {', '.join(DTYPES)}")


def load_model(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Return the model of a directory, ready for slot attention.

    Args:
        directory: what `save_pretrained` wrote.
        dtype: number format of the weights; with int8 that of the linear layers, and the rest is float32.

    Raises:
        ModelPathMissing: the directory holds no model.
        PolicyRefused: with int8, its layers cannot be made so.
    """
    if not (directory / "config.json").is_file():
        raise ModelPathMissing(
            f"no config.json in {directory}: give the directory that save_pretrained wrote, with config.json and "
            f"{WEIGHTS_FILE}"
        )
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32 if dtype == torch.int8 else dtype,
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
    )
    model = model.eval().requires_grad_(requires_grad=False)
    if dtype == torch.int8:
        quantise(model)
    return model


def model_dtype(model: torch.nn.Module) -> torch.dtype:
    """Return the number format of a model's weights."""
    return torch.int8 if int8_layers(model) else next(model.parameters()).dtype


def cache_shape(config: Any, slots: int, max_len: int) -> CacheShape:
    """Return the cache that a model needs.

    Raises:
        PolicyRefused: the model's attention is not plain causal attention within `max_len`.
    """
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < max_len:
        raise PolicyRefused(
            f"{config.model_type} attends to a window of {window} tokens, and this engine to all {max_len}: "
            f"set max_model_len to at most {window} or serve the model with vLLM"
        )
    heads = config.num_attention_heads
    return CacheShape(
        layers=config.num_hidden_layers,
        slots=slots,
        max_len=max_len,
        heads=getattr(config, "num_key_value_heads", None) or heads,
        dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a directory of safetensors, sharded or not.

    Raises:
        ModelPathMissing: there is no such directory or it holds no safetensors.
        PolicyRefused: a file cannot be read.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in files(directory):
        try:
            tensors.update(load_file(file))
        except SafetensorError as error:
            raise PolicyRefused(f"{file} is not a whole safetensors file: {error}") from error
    return tensors


def swap_weights(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Copy new weights into a model, or change nothing.

    Raises:
        PolicyRefused: names or shapes differ from the model's, or a weight is not finite.
    """
    current = model.state_dict()
    # A tied weight appears under both names in the model and under one in the file; it is one storage.
    given = {current[name].data_ptr() for name in tensors if name in current}
    missing = [name for name, tensor in current.items() if name not in tensors and tensor.data_ptr() not in given]
    unknown = [name for name in tensors if name not in current]
    misshapen = [
        f"{name} {tuple(tensor.shape)} for {tuple(current[name].shape)}"
        for name, tensor in tensors.items()
        if name in current and tensor.shape != current[name].shape
    ]
    if missing or unknown or misshapen:
        raise PolicyRefused(
            "these are weights of another model: "
            f"missing {missing[:3]}, unknown {unknown[:3]}, other shape {misshapen[:3]}; nothing was changed"
        )
    if broken := [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]:
        raise PolicyRefused(f"not all numbers of {broken[:3]} are finite: its trainer diverged; nothing was changed")
    layers = int8_layers(model)
    scales = {name: channel_scales(tensor) for name, tensor in tensors.items() if name in layers}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in layers:
                layers[name].put(tensor, scales[name])
            else:
                current[name].copy_(tensor)
