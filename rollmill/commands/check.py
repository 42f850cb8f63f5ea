"""`rollmill check RUN`: proves by SQL where every sample of a run went."""

from __future__ import annotations

from dataclasses import asdict

import click

from infra.arguments import RUN
from infra.clickhouse.check import Report, check
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from rollmill import output, store
from schemas.dispositions import Disposition

MEANINGS = {
    Disposition.OPEN: "on its way: no outcome yet",
    Disposition.FAILED: "the system failed it; it has no reward",
    Disposition.CANCELLED: "withdrawn",
    Disposition.EXPIRED: "its time ran out",
    Disposition.BUFFERED: "read by the trainer, waits for its group or batch",
    Disposition.TRAINED: "in a step",
    Disposition.FILTERED: "its siblings all did alike: nothing to learn",
    Disposition.STALE: "sampled by weights that were too old",
    Disposition.INCOMPLETE: "completed, but too few siblings did",
    Disposition.ROLLED_BACK: "in a step that was undone",
    Disposition.UNREAD: "has an outcome that no trainer has read",
    Disposition.UNUSED: "read, and not used when the run ended",
}
"""What a person is told of each place."""


@click.command("check")
@click.argument("run", type=RUN)
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
    if not report.admitted and not report.violations:
        output.console.print(f"nothing was ever published to run {report.run!r}; `rollmill runs` lists the runs")
        return
    rows = [(place, samples, MEANINGS[Disposition(place)]) for place, samples in report.counts.items()]
    rows.append(("admitted", report.admitted, "their sum"))
    output.print_table(f"samples of {report.run}", ("disposition", "samples", "meaning"), rows)
    open_ = report.counts.get(Disposition.OPEN, 0)
    going_on = f" so far: {open_} samples are on their way" if open_ else ""
    output.console.print(f"[green]conserved[/]{going_on}" if report.conserved else "[red]NOT conserved[/]")
    for violation in report.violations:
        output.console.print(f"  {violation}")
    if report.found > len(report.violations):
        output.console.print(f"  ... {report.found - len(report.violations)} more")
    if not report.admitted:
        output.console.print(f"  no task of run {report.run!r} was ever published; `rollmill runs` lists the runs")
