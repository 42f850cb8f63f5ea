"""A fork: a new run that begins with the weights of another run's checkpoint, and shares nothing else with it.

    <directory of the old run>/../<new run>/
        model/     weights of the checkpoint, tokenizer and config as the new configuration has them
        run.toml   the new run's configuration, for its feeder and for `--resume`

It appears by a rename, whole or not at all. The new run has decisions, versions and an optimizer of its own; where it
comes from is written into its configuration, and so into every TrainerStarted. The old run is only read.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from infra.bus import Bus
from infra.clock import Clock
from infra.errors import ConfigError
from trainer import checkpoint
from trainer.adapters import whole_weights
from trainer.config import Fork, RunConfig
from trainer.decision_log import read_history
from trainer.history import lora_of
from trainer.weights import load_model, sync_directory, weights_digest, write_durably, write_model_directory

RUN_FILE = "run.toml"
"""Configuration of a fork, in its directory."""


async def fork(config: RunConfig, name: str, bus: Bus, clock: Clock, text: Callable[[RunConfig], str]) -> RunConfig:
    """Make a run's fork and return its configuration.

    Args:
        config: the old run, with whatever the new one shall have otherwise.
        name: the new run.
        bus: the log, for the old run's decisions.
        clock: for the limits of reading.
        text: writes a configuration as TOML.

    Raises:
        ConfigError: there is nothing to fork from, the name is taken, or the weights do not fit the model.
    """
    if name == config.run:
        raise ConfigError(f"--fork {name}: a fork needs a name of its own")
    if (await read_history(bus, clock, name)).started:
        raise ConfigError(f"--fork {name}: a run of that name has been started; give --resume to go on with it")
    history = await read_history(bus, clock, config.run)
    saved = checkpoint.latest(config.checkpoints_directory, history.holds) if history.started else None
    if saved is None:
        raise ConfigError(
            f"--fork {name}: run {config.run!r} has no checkpoint in {config.checkpoints_directory} that its decisions "
            f"name; check `run` and `directory`, or start {name!r} as a run of its own"
        )
    weights = whole_weights(config.model, saved.weights, lora_of(history.config))
    forked = _named(config, name, saved, weights_digest(weights))
    _write(forked, config.model, weights, text(forked))
    return forked


def _named(config: RunConfig, name: str, saved: checkpoint.Checkpoint, digest: str) -> RunConfig:
    directory = config.directory.with_name(name)
    origin = Fork(
        run=config.run,
        epoch=saved.state.epoch,
        step=saved.state.step,
        weights=digest,
    )
    return config.model_copy(
        update={
            "run": name,
            "directory": directory,
            "model": directory / "model",
            # Two runs that write versions into one directory would remove each other's.
            "publish": config.publish.with_name(f"{config.publish.name}-{name}") if config.publish else None,
            "start": 0,
            "forked_from": origin,
        }
    )


def _write(forked: RunConfig, model: Path, weights: bytes, text: str) -> None:
    target = forked.directory
    if target.exists():
        raise ConfigError(f"{target} exists: remove it, or give the fork another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        write_model_directory(partial / "model", weights, model)
        try:
            load_model(partial / "model")
        except ConfigError as error:  # it was written just now: what cannot be loaded is the two together
            why = error.__cause__ or error
            raise ConfigError(f"the weights of the checkpoint do not fit the model in {model}: {why}") from error
        write_durably(partial / RUN_FILE, text.encode())
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(target.parent)
