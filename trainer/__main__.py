"""The trainer as a process: `python -m trainer RUN.toml [--resume] [--rollback STEP] [--set a.b=c] [--config FILE]`.

SIGTERM or SIGINT ends it at once and leaves everything to be resumed; a run that reaches its own end writes that down
and exits with 0. It only trains: who plays a suite or a scripted rule publishes tasks or knows their families, and
that is above this package. A run that asks for it is refused, with the command that does it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

import click

from infra.clock import SystemClock
from infra.config import load
from infra.connect import connected
from infra.errors import ConfigError
from infra.service import run_service, set_up_logging, until_stopped
from trainer import loop
from trainer.config import RunConfig, load_config
from trainer.crew import follow
from trainer.ranks import Ranks, ranks_here
from trainer.step_line import StepLines

log = logging.getLogger("trainer")


@click.command("trainer")
@click.argument("path", metavar="RUN.toml", type=click.Path(path_type=Path))
@click.option("--resume", is_flag=True, help="Go on with a run that was started before.")
@click.option("--rollback", type=click.IntRange(0), metavar="STEP", help="Go on from this step; undo the later ones.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Overrides a value of RUN.toml.")
@click.option("--config", "settings", type=click.Path(path_type=Path), help="TOML file with the settings of the log.")
@click.option("--bootstrap", help="Addresses of the Kafka brokers; before `bus.bootstrap`.")
@click.option("--prefix", help="Put before every topic name; before `bus.prefix`.")
@click.option("--blobs", help="Directory of the values too large for a record; before `bus.blobs`.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def command(
    path: Path,
    overrides: tuple[str, ...],
    settings: Path | None,
    bootstrap: str | None,
    prefix: str | None,
    blobs: str | None,
    *,
    resume: bool,
    rollback: int | None,
    as_json: bool,
) -> None:
    """Train the run of RUN.toml; `torchrun` may start several ranks of this."""
    set_up_logging()

    async def main(ranks: Ranks) -> None:
        config = load_config(path, overrides)
        require_plain(config, path)
        given = {"bootstrap": bootstrap, "prefix": prefix, "blobs": blobs}
        bus_overrides = [f"bus.{key}={value}" for key, value in given.items() if value is not None]
        async with connected(load(settings, bus_overrides).bus, client="trainer") as bus:

            async def train() -> None:
                result = await loop.run(
                    config,
                    bus,
                    SystemClock(),
                    resume=resume,
                    rollback=rollback,
                    on_progress=StepLines(log.info),
                    on_rollouts=lambda text: log.info("rollouts:\n%s", text),
                    ranks=ranks,
                )
                if as_json:
                    click.echo(json.dumps(asdict(result)))
                else:
                    log.info("run %s ended: %s; weights in %s", config.run, result.reason, result.directory)

            await until_stopped(train())

    with ranks_here() as ranks:
        if ranks.rank:
            follow(ranks)
        else:
            raise SystemExit(run_service(lambda: main(ranks)))


def require_plain(config: RunConfig, path: Path) -> None:
    """Refuse a run that wants more than to be trained.

    Args:
        config: the run.
        path: its RUN.toml.

    Raises:
        ConfigError: somebody else must play its suite, or its scripted rule.
    """
    baseline = config.guards.baseline
    wants = {
        "an [evaluation], whose suite must be played": config.evaluation is not None,
        "a guards.baseline without `bound`, whose rule must be played": baseline is not None and baseline.bound is None,
    }
    if any(wants.values()):
        found = " and ".join(what for what, wanted in wants.items() if wanted)
        raise ConfigError(
            f"run {config.run!r} has {found}; `python -m trainer` only trains. Start it by `rollmill train {path}`, "
            f"with the same options (`--run-set` for what is `--set` here, `--set bus.bootstrap=...` for "
            f"`--bootstrap`), or leave that out"
        )


if __name__ == "__main__":
    command()
