"""Checkpoints: everything a trainer needs to go on, in one directory that exists whole or not at all.

    <epoch>-<step>/
        model.safetensors   weights: of the whole model, or of its adapters where only they are trained
        optimizer.pt        optimizer and random state
        state.json          what is decided (`TrainerState`); no bodies of records: the log has them
        files.json          SHA-256 of each of these; written last

Written beside its final name, flushed to the disk, then renamed. A directory whose files do not match `files.json` is
not a checkpoint: the one before it is used. This file does not know what the bytes mean.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from infra.disk import room_for
from infra.inference.weight_files import WEIGHTS_FILE
from trainer.state import TrainerState
from trainer.weights import sync_directory, write_durably

log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.pt"
"""Optimizer and random state."""

STATE_FILE = "state.json"
"""What is decided."""

MANIFEST_FILE = "files.json"
"""SHA-256 of the others; written last."""

Accept = Callable[[TrainerState], bool]
"""Tells of a checkpoint by its state."""

_NAME = re.compile(r"(\d+)-(\d+)")
_PARTIAL = re.compile(r"\.(\d+)-(\d+)\.[0-9a-f]+")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk."""

    directory: Path
    state: TrainerState

    @property
    def weights(self) -> Path:
        """The weight file."""
        return self.directory / WEIGHTS_FILE

    def optimizer(self) -> bytes:
        """Return optimizer and random state."""
        return (self.directory / OPTIMIZER_FILE).read_bytes()


RESUME = "Steps are decided in the log, so none is lost: `rollmill train RUN.toml --resume` makes this one again."
"""What is said when there is no room for a checkpoint."""


def save(parent: Path, state: TrainerState, weights: bytes, optimizer: bytes) -> Checkpoint:
    """Write a checkpoint and return once it would survive a power cut. Raises NoSpace; then the one before is whole."""
    with room_for(f"the checkpoint of step {state.step}", parent, then=RESUME):
        return _save(parent, state, weights, optimizer)


def _save(parent: Path, state: TrainerState, weights: bytes, optimizer: bytes) -> Checkpoint:
    parent.mkdir(parents=True, exist_ok=True)
    target = parent / f"{state.epoch}-{state.step}"
    partial = parent / f".{target.name}.{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        files = {
            WEIGHTS_FILE: weights,
            OPTIMIZER_FILE: optimizer,
            STATE_FILE: msgspec.json.encode(state),
        }
        for name, data in files.items():
            write_durably(partial / name, data)
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        write_durably(partial / MANIFEST_FILE, json.dumps(digests, indent=1).encode())
        sync_directory(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(parent)
    return Checkpoint(target, state)


def latest(parent: Path, accept: Accept = lambda _: True) -> Checkpoint | None:
    """Return the complete checkpoint with the most steps, then the highest epoch, that `accept` takes."""
    for directory in _candidates(parent):
        checkpoint = _open(directory)
        if checkpoint is not None and accept(checkpoint.state):
            return checkpoint
    return None


def prune(
    parent: Path,
    keep: int,
    *,
    milestones: int | None,
    own: TrainerState,
    live: Accept,
    pinned: Collection[int | None] = (),
) -> None:
    """Remove checkpoints that no resume and no rollback needs, and what an interrupted `save` left.

    Of the steps that the run has live, the newest `keep` stay, every one that `milestones` divides and every one that
    is pinned; a rollback to a step between two that stay begins at the one before it. A step that was saved twice is
    one step and the newer checkpoint stays, so that repeated resumes never push older steps out.

    Args:
        parent: where checkpoints live.
        keep: steps kept, counted from the newest.
        milestones: keep these multiples too.
        own: the checkpoint just written; what a later trainer writes beside it is left alone.
        live: tells whether a checkpoint's step is one of the run, and not one that was rolled back.
        pinned: steps that stay, whatever their age.
    """
    kept: set[int] = set()
    for directory in list(_candidates(parent)):
        state = _state(directory)
        if state is not None and state.epoch > own.epoch:
            continue
        wanted = state is not None and live(state) and state.step not in kept
        if state is not None and wanted and (len(kept) < keep or _stays(state.step, milestones, pinned)):
            kept.add(state.step)
        else:
            shutil.rmtree(directory)
    for partial in parent.glob(".*-*.*"):
        match = _PARTIAL.fullmatch(partial.name)
        if match and int(match[1]) <= own.epoch:
            shutil.rmtree(partial, ignore_errors=True)


def _stays(step: int, milestones: int | None, pinned: Collection[int | None]) -> bool:
    return step in pinned or (milestones is not None and step % milestones == 0)


def _candidates(parent: Path) -> Iterator[Path]:
    if not parent.is_dir():
        return
    named = [(match, path) for path in parent.iterdir() if (match := _NAME.fullmatch(path.name))]
    named.sort(key=lambda item: (int(item[0][2]), int(item[0][1])), reverse=True)
    yield from (path for _, path in named)


def _open(directory: Path) -> Checkpoint | None:
    try:
        digests: dict[str, str] = json.loads((directory / MANIFEST_FILE).read_bytes())
        for name, digest in digests.items():
            with (directory / name).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != digest:
                log.warning("checkpoint %s: %s has changed since it was written; not used", directory, name)
                return None
    except (OSError, ValueError) as error:
        log.warning("checkpoint %s is not complete (%s); not used", directory, error)
        return None
    state = _state(directory)
    return Checkpoint(directory, state) if state is not None else None


def _state(directory: Path) -> TrainerState | None:
    """Return what a checkpoint says was decided; none if it cannot be read."""
    try:
        return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=TrainerState)
    except (OSError, ValueError) as error:
        log.warning("the state of checkpoint %s cannot be read (%s); not used", directory, error)
        return None
