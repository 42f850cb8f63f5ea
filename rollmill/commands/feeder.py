"""`rollmill feeder RUN.toml`: publishes a run's groups as far ahead as its trainer allows."""

from __future__ import annotations

from pathlib import Path

import click

from infra.arguments import FilePath
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.heap import hold_flat
from infra.service import set_up_logging, until_stopped
from producers.feeder import Feeder
from producers.sources import describe, make_source
from rollmill import output
from rollmill.manifest import manifest_of
from trainer.config import RunConfig, load_config


@click.command("feeder")
@click.argument("run_toml", type=FilePath())
@output.preset_option
@click.option("--run-set", "run_overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of RUN.toml.")
@output.config_options
def command(run_toml: Path, preset: str | None, run_overrides: tuple[str, ...], config: Config) -> None:
    """Feed a run from the task source in the [tasks] section of RUN.toml."""
    set_up_logging()
    hold_flat()
    run = load_config(run_toml, run_overrides, preset)
    output.run(_serve(run, run_toml.parent, config))


async def _serve(run: RunConfig, folder: Path, config: Config) -> None:
    source = make_source(describe(dict(run.tasks)), folder)
    async with connected(config.bus, client="feeder") as bus:
        difficulty = run.curriculum.difficulty
        floor = difficulty.floor if difficulty else None
        feeder = Feeder(bus, SystemClock(), run.run, source, expected=manifest_of(run), floor=floor)

        async def feed() -> None:
            await feeder.run()

        await until_stopped(feed())
