"""`rollmill explain batch RUN`: why the next batch of a run does not form."""

from __future__ import annotations

import click

from infra.arguments import RUN
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from rollmill import output
from trainer.explain import Waiting, explain


@click.group("explain")
def command() -> None:
    """Say why something does not happen."""


@command.command("batch")
@click.argument("run", type=RUN)
@output.json_option
@output.config_options
def batch(run: str, as_json: bool, config: Config) -> None:
    """Say what the next step of RUN needs, what is there, and what the rest waits for.

    It reads the log alone, by the rules that the trainer recorded, whether a trainer runs or not.
    """
    found = output.run(_explain(run, config))
    output.print_result(found.as_dict(), as_json, lambda _: _show(found))


async def _explain(run: str, config: Config) -> Waiting:
    async with connected(config.bus, client="explain") as bus:
        return await explain(bus, SystemClock(), run)


def _show(found: Waiting) -> None:
    for cause in found.causes():
        output.console.print(f"- {cause}", highlight=False)
    if len(found.missing) > 1:
        rows = [(group, ", ".join(map(str, samples))) for group, samples in found.missing.items()]
        output.print_table("begun groups, the oldest first", ("group", "samples that have not ended"), rows)
