"""`rollmill publish FILE.jsonl --run RUN`: every usable line becomes one group of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from infra.arguments import INT64, RUN, TEXT, FilePath, Number
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.errors import ConfigError
from producers.jsonl import JsonlSource
from producers.publish import publish_source
from rollmill import output
from schemas.control import RunManifest
from schemas.messages import TASK_RANGES
from schemas.transcript import SAMPLING_RANGES, Sampling
from stages.handlers.registry import families

# What a stage would refuse is refused here, and the help says so.
HORIZON = click.IntRange(*TASK_RANGES["horizon"])
_FEWEST, _MOST = SAMPLING_RANGES["max_tokens"]
MAX_TOKENS = click.IntRange(int(_FEWEST), int(_MOST))
TEMPERATURE = Number(*SAMPLING_RANGES["temperature"])


@click.command("publish")
@click.argument("file", type=FilePath())
@click.option("--run", "run", required=True, type=RUN, help="The run to publish to; made when it is new.")
@click.option("--samples", default=1, show_default=True, type=click.IntRange(1, 1024), help="Siblings per group.")
@click.option("--seed", default=0, show_default=True, type=INT64, help="Seed of all derived seeds.")
@click.option("--horizon", default=16, show_default=True, type=HORIZON, help="Most turns of an episode.")
@click.option("--max-tokens", default=256, show_default=True, type=MAX_TOKENS, help="Most tokens of a turn.")
@click.option("--temperature", default=1.0, show_default=True, type=TEMPERATURE, help="Of the sampling.")
@click.option("--name", default=None, type=TEXT, help="Name of the source in group ids; the file's name unless given.")
@output.json_option
@output.config_options
def command(file: Path, as_json: bool, config: Config, **options: Any) -> None:
    """Publish the tasks of a JSONL file; a line that cannot be used is named and the rest is published."""
    result = output.run(_publish(file, config, **options))
    output.print_result(result, as_json, _show)
    if result["bad_lines"]:
        raise SystemExit(1)


async def _publish(
    file: Path,
    config: Config,
    *,
    run: str,
    samples: int,
    seed: int,
    horizon: int,
    max_tokens: int,
    temperature: float,
    name: str | None,
) -> dict[str, Any]:
    source = JsonlSource(file, name=name, known_families=families())
    wanted = RunManifest(
        run=run,
        seed=seed,
        samples=samples,
        horizon=horizon,
        sampling=Sampling(temperature=temperature, max_tokens=max_tokens),
    )
    async with connected(config.bus, client="producer") as bus:
        published = await publish_source(bus, SystemClock(), source, wanted)
    if not published:
        raise ConfigError(f"{file} holds no usable task")
    return {"run": run, "tasks": published, "samples": samples, "bad_lines": [str(bad) for bad in source.bad]}


def _show(result: dict[str, Any]) -> None:
    groups = result["tasks"] // result["samples"]
    output.console.print(
        f"published {result['tasks']} tasks ({groups} groups of {result['samples']}) to run [bold]{result['run']}[/]; "
        "what it had already is not done again"
    )
    for bad in result["bad_lines"]:
        output.errors.print(f"[yellow]not published:[/] {bad}")
