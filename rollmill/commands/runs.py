"""`rollmill runs`: the runs that the log knows, from their manifests."""

from __future__ import annotations

from typing import Any

import click

from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.control import ControlView, control_now
from infra.inference.quarantine import announced, quarantined
from rollmill import output
from schemas.control import Cancel, Credit, Cursor, RunManifest


@click.command("runs")
@output.json_option
@output.config_options
def command(as_json: bool, config: Config) -> None:
    """List the runs."""
    runs = output.run(_runs(config))
    output.print_result({"runs": runs}, as_json, _show)


async def _runs(config: Config) -> list[dict[str, Any]]:
    async with connected(config.bus, client="runs") as bus:
        view = await control_now(bus, SystemClock())
        return [_describe(view, manifest) for manifest in view.all(RunManifest)]


def _describe(view: ControlView, manifest: RunManifest) -> dict[str, Any]:
    run = manifest.run
    cursor, policy = view.get(f"cursor/{run}", Cursor), announced(view, run)
    credit, cancel = view.get(f"credit/{run}", Credit), view.get(f"cancel/{run}", Cancel)
    return {
        "run": run,
        "created": output.iso(manifest.created_ms),
        "seed": manifest.seed,
        "samples": manifest.samples,
        "admitted": cursor.admitted if cursor else None,
        "version": policy.version if policy else None,
        "quarantined": bad.cause if (bad := quarantined(view, run)) else None,
        "trainer": None if credit is None else "ended" if credit.closed else "open",
        "cancelled": None if cancel is None else cancel.cause,
    }


def _show(result: dict[str, Any]) -> None:
    columns = ("run", "created", "seed", "samples", "admitted", "version", "trainer", "cancelled")
    rows = [["-" if row[column] is None else row[column] for column in columns] for row in result["runs"]]
    titles = {"samples": "samples of a group", "admitted": "groups admitted"}
    output.print_table("runs", [titles.get(column, column) for column in columns], rows)
    for row in result["runs"]:
        if row["quarantined"] is not None:
            output.console.print(
                f"run {row['run']}: version {row['version']} is in quarantine, loaded nowhere: {row['quarantined']}",
                style="red",
                markup=False,
            )
