"""`rollmill diff RUN RUN`: where two runs part, and why."""

from __future__ import annotations

import click

from infra.arguments import RUN
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from rollmill import output
from trainer.diff import Diff, diff


@click.command("diff")
@click.argument("first", metavar="RUN", type=RUN)
@click.argument("second", metavar="RUN", type=RUN)
@output.json_option
@output.config_options
def command(first: str, second: str, as_json: bool, config: Config) -> None:
    """Find the first step in which two runs differ, and name its cause. Exits with 1 when they do.

    Samples of two runs are matched by where their tasks came from: source, visit, row and sibling. With the same run
    twice, its log is compared with what its trainer wrote down: a record that was changed since is named.
    """
    found = output.run(_diff(first, second, config))
    output.print_result(found.as_dict(), as_json, lambda _: _show(found))
    if not found.empty:
        raise SystemExit(1)


async def _diff(first: str, second: str, config: Config) -> Diff:
    async with connected(config.bus, client="diff") as bus:
        return await diff(bus, SystemClock(), first, second)


def _show(found: Diff) -> None:
    if found.settings:
        rows = [(name, output.safe(one), output.safe(other)) for name, (one, other) in found.settings.items()]
        output.print_table("settings that differ", ("setting", *found.runs), rows)
    output.console.print(output.safe(found.summary()))
