"""Model directories: read one, write one atomically, name its weights by digest.

A weight version is a directory that any loader of model directories reads: `model.safetensors` and copies of every
other file of the model the run began with (config, tokenizer, chat template). It appears by a rename, whole or not at
all. The digest is SHA-256 of the weight file, whose bytes depend on the weights alone. This file does not know
versions or steps.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from infra.disk import room_for
from infra.errors import ConfigError
from infra.inference.weight_files import WEIGHTS_FILE

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".msgpack", ".h5", ".gguf"}


def load_model(directory: Path, device: str = "cpu") -> torch.nn.Module:
    """Return the causal language model of a directory in float32, without dropout.

    Raises:
        ConfigError: there is no model that can be loaded, or no such device.
    """
    _require_device(device)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model = {directory}: it has no config.json; name a model directory (save_pretrained)")
    # A progress bar per load is noise in a service's log.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        )
    except Exception as error:
        raise ConfigError(f"model = {directory}: it cannot be loaded: {type(error).__name__}: {error}") from error
    # Evaluation mode on purpose: with dropout the ratio would compare two different functions.
    return model.to(device).eval()


def _require_device(device: str) -> None:
    """Raise ConfigError unless tensors can be made and read there."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # no such word, no driver, no build for it
        raise ConfigError(f"device = {device!r}: it cannot be used: {str(error).partition(chr(10))[0]}") from error


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Let a model keep no activations of its layers for the way back but compute them again.

    Raises:
        ConfigError: the model cannot do that.
    """
    try:
        model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    except ValueError as error:
        raise ConfigError(f"activation_checkpointing: this model cannot: {error}") from error
    # Models do it in training mode alone; dropout stays off as in evaluation mode.
    model.train()
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
        elif isinstance(getattr(layer, "attention_dropout", None), float):
            layer.attention_dropout = 0.0


def stored_names(model: torch.nn.Module) -> list[str]:
    """Return the tensors that a weight file holds: tied ones are stored once, under their first name."""
    names: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        names.setdefault(tensor.data_ptr(), name)
    return list(names.values())


def weight_bytes(model: torch.nn.Module) -> bytes:
    """Return the weight file of a model."""
    tensors = model.state_dict()
    return file_bytes({name: tensors[name] for name in stored_names(model)})


def file_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the weight file of some tensors."""
    return save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, metadata={"format": "pt"})


def read_weights(file: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file written by `file_bytes`.

    Raises:
        ConfigError: it holds others than these.
    """
    tensors, wanted = load_file(file), set(names)
    missing, unexpected = sorted(wanted - tensors.keys()), sorted(tensors.keys() - wanted)
    if missing or unexpected:
        raise ConfigError(f"{file} is of another model: missing {missing[:3]}, unexpected {unexpected[:3]}")
    return tensors


def weights_digest(data: bytes) -> str:
    """Return the name of a weight file's content."""
    return hashlib.sha256(data).hexdigest()


def write_model_directory(target: Path, weights: bytes, source: Path) -> None:
    """Write a model directory with these weights and the other files of `source`; an existing one is kept.

    The name must follow from the content, since an existing directory is taken to be the same.
    """
    if target.is_dir():
        return
    then = "Nothing half-written is left; call it again, a trainer with `--resume`."
    with room_for("a model directory", target, then=then):
        _write_model_directory(target, weights, source)


def _write_model_directory(target: Path, weights: bytes, source: Path) -> None:
    if not source.is_dir():
        raise ConfigError(
            f"the model directory {source} is gone, so {target.name} has no configuration and no tokenizer: put it "
            "back (`model` of RUN.toml names it), then call this again, a trainer with `--resume`"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        for file in sorted(source.iterdir()):
            if file.is_file() and not _holds_weights(file):
                write_durably(partial / file.name, file.read_bytes())
        write_durably(partial / WEIGHTS_FILE, weights)
        # The name says that it is whole, also after a power cut.
        sync_directory(partial)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(target.parent)


def write_durably(file: Path, data: bytes) -> None:
    """Write a file and return once it is on the disk."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Return once the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _holds_weights(file: Path) -> bool:
    return file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
