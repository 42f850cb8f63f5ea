"""`rollmill export RUN@best --to DIR`: a version of a run as a model folder for others."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from infra.arguments import TEXT, FilePath
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.errors import ConfigError
from rollmill import output
from trainer.decision_log import read_started


@click.command("export")
@click.argument("version", metavar="RUN@NAME", type=TEXT)
@click.option("--to", "target", required=True, type=FilePath(), help="The folder; it must not exist.")
@click.option("--int8", is_flag=True, help="Linear layers as int8: about a quarter of the size; needs torchao.")
@output.json_option
@output.config_options
def command(version: str, target: Path, int8: bool, as_json: bool, config: Config) -> None:
    """Write a version of a run into a folder that transformers loads as it is.

    NAME is `best` (of the run's evaluations), `last` or `step:N`. The folder holds weights, config, tokenizer and chat
    template, and a README.md with run, version, digest and the table of evaluations. Run it where the trainer ran: the
    weights are taken from the run's directory.
    """
    run, at, name = version.rpartition("@")
    if not at or not run or not name:
        raise click.UsageError(f"{version!r}: name run and version as RUN@best, RUN@last or RUN@step:N")
    output.print_result(output.run(_export(run, name, target, config, int8=int8)), as_json, _show)


async def _export(run: str, name: str, target: Path, config: Config, *, int8: bool) -> dict[str, Any]:
    try:
        from trainer.export import export  # noqa: PLC0415 - imports torch
    except ImportError as error:
        raise ConfigError(f"export needs torch: pip install 'rollmill[train]' ({error})") from error
    async with connected(config.bus, client="export") as bus:
        history, _ = await read_started(bus, SystemClock(), run)
    return asdict(await asyncio.to_thread(export, history, name, target, int8=int8))


def _show(result: dict[str, Any]) -> None:
    output.console.print(
        f"step {result['step']} of run [bold]{result['run']}[/] (version {result['version']}, "
        f"{result['digest'][:12]}) is in {result['directory']}"
        f": {result['weight_bytes'] / 1e6:,.1f} MB{', linear layers as int8' if result['int8'] else ''}"
    )
