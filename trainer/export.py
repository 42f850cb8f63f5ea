"""A version as a folder for others: weights, config, tokenizer, chat template, and a page that says where it is from.

What a version is, the log says; its weights are taken from wherever they still lie on this machine (the versions that
are kept for the policy, the run's checkpoints, the model that the run began with), and must have the digest that the
log names. A version never holds a value head, nor adapters, which are merged. The folder appears by a rename, whole or
not at all.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import ConfigError
from infra.inference.weight_files import WEIGHTS_FILE
from schemas.decisions import VersionPublished
from trainer import checkpoint
from trainer.adapters import whole_weights
from trainer.aliases import named
from trainer.history import History, lora_of
from trainer.int8 import require_int8, to_int8
from trainer.model_card import model_card
from trainer.weights import (
    load_model,
    sync_directory,
    weight_bytes,
    weights_digest,
    write_durably,
    write_model_directory,
)

CARD_FILE = "README.md"
"""The page, as model hubs name it."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    run: str
    """The run."""
    name: str
    """What was asked for."""
    step: int
    """The step."""
    version: int
    """The version."""
    digest: str
    """SHA-256 of the version's weight file, as the log names it."""
    int8: bool
    """The folder holds the version's weights as int8, not this file."""
    weight_bytes: int
    """Size of the weight file in the folder."""
    directory: str
    """The folder."""


def export(history: History, name: str, target: Path, *, int8: bool = False) -> Exported:
    """Write a version of a run into a new folder; blocking.

    Args:
        history: the run, which a trainer has started.
        name: the version, as `trainer/aliases.py` understands it.
        target: the folder.
        int8: write the weights of linear layers as int8.

    Raises:
        ConfigError: there is no such version, its weights are gone, the folder exists, or a package is missing.
    """
    if int8:
        require_int8()
    if target.exists():
        raise ConfigError(f"{target} exists: remove it, or give another folder")
    version = named(history, name)
    card = model_card(history, version, int8=int8)
    _write(target, _weights(history, version), Path(history.config["model"]), card, int8=int8)
    return Exported(
        run=version.run,
        name=name,
        step=version.step,
        version=version.version,
        digest=version.digest,
        int8=int8,
        weight_bytes=(target / WEIGHTS_FILE).stat().st_size,
        directory=str(target),
    )


def _weights(history: History, version: VersionPublished) -> bytes:
    """Return the weight file of a version from the first place that still has it."""
    looked_at = []
    for place, read in _places(history, version):
        looked_at.append(str(place))
        data = read()
        if data is not None and weights_digest(data) == version.digest:
            return data
    raise ConfigError(
        f"the weights of step {version.step} (version {version.version}, SHA-256 {version.digest[:12]}...) are no "
        f"longer in {', '.join(looked_at)}. Export `last` or `best`; `checkpoints.milestones` keeps more"
    )


def _places(history: History, version: VersionPublished) -> Iterator[tuple[Path, Callable[[], bytes | None]]]:
    """Yield where the weights of a version may lie, with how they are read."""
    config = history.config
    versions = _versions_directory(config) / f"v{version.version:06d}-{version.digest[:12]}"
    yield versions, lambda: _read(versions / WEIGHTS_FILE)
    checkpoints = Path(config["directory"]) / "checkpoints"

    def saved() -> bytes | None:
        found = checkpoint.latest(checkpoints, lambda state: state.step == version.step and history.holds(state))
        return whole_weights(Path(config["model"]), found.weights, lora_of(config)) if found else None

    yield checkpoints, saved
    if version.step == 0:
        model = Path(config["model"])
        yield model, lambda: weight_bytes(load_model(model))


def _versions_directory(config: Mapping[str, Any]) -> Path:
    return Path(config["publish"]) if config.get("publish") else Path(config["directory"]) / "versions"


def _read(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _write(target: Path, weights: bytes, source: Path, card: str, *, int8: bool) -> None:
    if not source.is_dir():
        raise ConfigError(f"the run's model directory {source} is not there: config and tokenizer are taken from it")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        write_model_directory(partial, weights, source)
        if int8:
            to_int8(partial)
        write_durably(partial / CARD_FILE, card.encode())
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(target.parent)
