"""The command line: `python -m benchmarks NAME --json [--quick]`, or `--all`.

With `--json` the last line on standard output is one JSON object: the result of NAME, or with `--all` name -> result.
Without it, a table. Modules are loaded when they are measured: a benchmark may need what another one does not.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, replace

import click

from benchmarks import report
from benchmarks.result import Result
from benchmarks.table import TABLE
from infra.errors import RollmillError


@click.command("benchmarks")
@click.argument("name", type=click.Choice(list(TABLE)), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object last.")
@click.option("--quick", is_flag=True, help="End within 50 s a benchmark, with fewer and shorter rounds.")
@click.option("--all", "everything", is_flag=True, help="Measure all and write results.json and the page of the docs.")
def command(name: str | None, *, as_json: bool, quick: bool, everything: bool) -> None:
    """Measure NAME against its rivals, both in this call."""
    if (name is None) is not everything:
        raise click.UsageError("give the NAME of one benchmark, or --all")
    try:
        results = {one: measured(one, quick=quick) for one in (TABLE if name is None else [name])}
    except RollmillError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    if everything:
        report.write(results, TABLE, quick=quick)
    if not as_json:
        click.echo(report.as_table(results, TABLE, quick=quick), nl=False)
    elif name is not None:
        click.echo(results[name].to_json())
    else:
        click.echo(json.dumps({one: asdict(result) for one, result in results.items()}))


def measured(name: str, *, quick: bool) -> Result:
    """Run one benchmark and note on which machine, and how busy that was before and after."""
    before = report.machine()
    result: Result = importlib.import_module(TABLE[name].module).measure(quick=quick)
    return replace(result, detail={**result.detail, "machine": {"before": before, "after": report.machine()}})


if __name__ == "__main__":
    command()
