"""Where a trainer begins: what it may not begin with, and from which checkpoint it goes on.

Pure but for reading checkpoints and trying directories. The order matters and is the loop's: refuse first, then become
the run's trainer, then branch, then stand where the checkpoint stood. What the decisions say is in `history.py`, what a
resumed run may change in `resume.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

from infra.errors import ConfigError
from infra.inference.model_digest import TokenizerMissing, tokenizer_digest
from schemas.decisions import ForkedFrom
from trainer import checkpoint
from trainer.checkpoint import Checkpoint
from trainer.config import RunConfig
from trainer.groups import AssemblerState
from trainer.history import History
from trainer.resume import refuse_changes
from trainer.state import TrainerState

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What the person who starts a trainer wants of it."""

    resume: bool = False
    """Go on with a run that was started before; without it such a run is refused."""
    rollback: int | None = None
    """Go on from this step, and undo the later ones."""
    cause: str = ""
    """Why the trainer goes back by itself; empty if a person wants it."""
    force: bool = False
    """Begin a run although its model is unfit to be trained."""


def find_checkpoint(config: RunConfig, history: History, rollback: int | None = None) -> Checkpoint | None:
    """Return the newest checkpoint of a step that the run has, at most that of a rollback; blocking."""

    def accept(state: TrainerState) -> bool:
        return history.holds(state) and (rollback is None or state.step <= rollback)

    return checkpoint.latest(config.checkpoints_directory, accept)


def refuse(
    config: RunConfig, history: History, now: Mapping[str, Any], intent: Intent, saved: Checkpoint | None
) -> None:
    """Raise ConfigError if this configuration cannot go on from this history as intended; blocking."""
    name = config.run
    if history.started and not intent.resume:
        raise ConfigError(
            f"run {name!r} has been started before ({len(history.steps)} steps decided): give --resume to go on "
            f"with it, or another name in `run`"
        )
    if intent.rollback is not None and not 0 <= intent.rollback <= history.last_step:
        raise ConfigError(
            f"--rollback {intent.rollback}: run {name!r} has made {history.last_step} steps; name one of them, or 0 "
            f"for the model that it began with"
        )
    where = config.checkpoints_directory
    if saved is None and checkpoint.latest(where) is not None and checkpoint.latest(where, history.knows) is None:
        raise ConfigError(
            f"{where} holds checkpoints whose steps are not in the log: this is another log, or another run's "
            f"directory. Give the run a `directory` of its own, or the bootstrap address of its log"
        )
    if history.started:
        for key, (then, ours) in refuse_changes(name, history.config, now).items():
            log.info("run %s goes on with another %s: %s, before %s", name, key, ours, then)


def require_directories(config: RunConfig) -> None:
    """Make the directories that the trainer writes to. Raises ConfigError, with the setting, where it may not."""
    for key, directory in (("directory", config.directory), ("publish", config.versions_directory)):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(f"{key} = {directory}: nothing can be written there: {error.strerror}") from error


def fresh_state(run: str, start: int, epoch: int) -> TrainerState:
    """Return the state before the first step of a run whose records begin at an offset."""
    assembler = AssemblerState.fresh(start)
    return TrainerState(run=run, epoch=epoch, digest="", decisions=-1, assembler=assembler)


def origin(config: RunConfig) -> ForkedFrom | None:
    """Return the checkpoint whose weights a run begins with, if it is a fork."""
    return ForkedFrom(**config.forked_from.model_dump()) if config.forked_from else None


def tokenizer_of(config: RunConfig) -> str:
    """Return the digest of tokenizer and chat template. Raises ConfigError."""
    try:
        return tokenizer_digest(config.model)
    except TokenizerMissing as error:
        raise ConfigError(f"model = {config.model}: {error}") from error
