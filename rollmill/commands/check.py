"""`rollmill check RUN`: proves by SQL where every sample of a run went."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from infra.clickhouse.check import Report, check
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from rollmill import output, store


@click.command("check")
@click.argument("run")
@output.json_option
@output.config_options
def command(run: str, as_json: bool, config: Config) -> None:
    """Check the dispositions of a run's samples. Exits with 1 when they do not add up."""
    report = output.run(_check(run, config))
    output.print_result({**asdict(report), "conserved": report.conserved}, as_json, lambda _: _show(report))
    if not report.conserved:
        raise SystemExit(1)


async def _check(run: str, config: Config) -> Report:
    async with connected(config.bus, client="check") as bus:
        return await check(bus, store.address(config), SystemClock(), run)


def _show(report: Report) -> None:
    rows: list[tuple[Any, Any]] = [*report.counts.items(), ("admitted", report.admitted)]
    output.print_table(f"samples of {report.run}", ("disposition", "samples"), rows)
    output.console.print("[green]conserved[/]" if report.conserved else "[red]NOT conserved[/]")
    for violation in report.violations:
        output.console.print(f"  {violation}")
    if report.found > len(report.violations):
        output.console.print(f"  ... {report.found - len(report.violations)} more")
    if not report.admitted:
        output.console.print(f"  nothing was ever published to run {report.run!r}; `rollmill runs` lists the runs")
