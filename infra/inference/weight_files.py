"""What a directory of safetensors holds, read from its headers alone: names, shapes, and whether its files are whole.

An engine that is told to load what is not there, or another model's weights, may not survive it: vLLM shuts itself
down. So whoever tells it looks first, from where it is. The format is safetensors' own: eight bytes of length, a JSON
header, the data. This file does not know torch, and reads no tensor.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from infra.inference.base import ModelPathMissing, PolicyRefused

Shapes = dict[str, tuple[int, ...]]
"""Name of each tensor -> its shape."""

WEIGHTS_FILE = "model.safetensors"
"""The weights, where one file holds them."""
INDEX_FILE = "model.safetensors.index.json"
"""Which file holds which tensor, where several do."""

HEADER_BYTES = 100 << 20
"""Longest header, bytes: safetensors' own limit."""
SHOWN = 3
"""So many names are shown of those that differ."""


def shapes(directory: Path) -> Shapes:
    """Return the tensors of a directory.

    Raises:
        ModelPathMissing: there is no such directory, or it holds no safetensors.
        PolicyRefused: a file is not whole.
    """
    found: Shapes = {}
    for file in files(directory):
        try:
            found |= _header(file)
        except (OSError, ValueError, struct.error) as error:
            raise PolicyRefused(f"{file} is not a whole safetensors file: {error}") from error
    return found


def files(directory: Path) -> list[Path]:
    """Return the files of a directory's weights, one or several.

    Raises:
        ModelPathMissing: there is no such directory, or one of them is not there.
        PolicyRefused: their index cannot be read.
    """
    index, names = directory / INDEX_FILE, [WEIGHTS_FILE]
    if index.is_file():
        try:
            names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
        except (OSError, msgspec.DecodeError) as error:
            raise PolicyRefused(f"{index} is not an index of safetensors: {error}") from error
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ModelPathMissing(
            f"no {', '.join(missing)} in {directory}, as seen from here: publish the weights before announcing them, "
            "in a directory that trainer, engine and whoever brings the weights have under one path"
        )
    return [directory / name for name in names]


def difference(given: Shapes, served: Shapes) -> str:
    """Return how weights differ from those of the model that is served; empty if they are of one model.

    A tensor that one of them lacks is a difference only if its shape is in no other: tied weights have one name or two.
    """
    odd = [f"{name} {shape} for {served[name]}" for name, shape in given.items() if served.get(name, shape) != shape]
    sizes = set(served.values()), set(given.values())
    unknown = [name for name in given.keys() - served.keys() if given[name] not in sizes[0]]
    missing = [name for name in served.keys() - given.keys() if served[name] not in sizes[1]]
    parts = {"other shape": odd, "unknown": unknown, "missing": missing}
    return "; ".join(f"{what}: {', '.join(sorted(names)[:SHOWN])}" for what, names in parts.items() if names)


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _header(file: Path) -> Shapes:
    """Return the tensors of one file. Raises ValueError if it is not whole, or no safetensors."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > HEADER_BYTES:
            raise ValueError(f"its header would have {length} bytes")
        entries = msgspec.json.decode(opened.read(length), type=dict[str, msgspec.Raw])
        size = opened.seek(0, 2)
    entries.pop("__metadata__", None)
    tensors = {name: msgspec.json.decode(entry, type=_Tensor) for name, entry in entries.items()}
    end = 8 + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size != end:
        raise ValueError(f"it has {size} bytes, and its header speaks of {end}")
    return {name: tensor.shape for name, tensor in tensors.items()}
