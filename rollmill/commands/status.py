"""`rollmill status`: lag of every stage, what is in flight, the oldest work of each stage, and what stands still.

Reads lag from the broker, the latest `events` and `control`; it needs no other service to be alive.
"""

from __future__ import annotations

from typing import Any

import click

from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from rollmill import output
from rollmill.breakers import Standstill, standstills
from rollmill.lag import stage_lags
from rollmill.recent import recent_work


@click.command("status")
@output.json_option
@output.config_options
def command(as_json: bool, config: Config) -> None:
    """Show how the pipeline stands."""
    output.print_result(output.run(_status(config)), as_json, _show)


async def _status(config: Config) -> dict[str, Any]:
    clock = SystemClock()
    async with connected(config.bus, client="status") as bus:
        lags = await stage_lags(bus)
        work = await recent_work(bus, clock)
        still = await standstills(bus, clock)
    return {
        "stages": [
            {
                "stage": lag.stage,
                "lag": lag.lag,
                "topics": lag.topics,
                "in_flight": len(work.open.get(lag.stage, {})),
                "finished": work.finished[lag.stage],
                "failed": work.failed[lag.stage],
                "oldest": work.oldest(lag.stage, clock.now_ms()),
            }
            for lag in lags
        ],
        "paused": [one.as_dict() for one in still],
        "window_s": work.window_s,
    }


def _show(result: dict[str, Any]) -> None:
    for paused in result["paused"]:
        click.echo(str(Standstill(**paused)))
    rows = [
        (
            stage["stage"],
            stage["lag"],
            stage["in_flight"],
            stage["finished"],
            stage["failed"],
            stage["oldest"] or "-",
        )
        for stage in result["stages"]
    ]
    window = f"last {result['window_s'] / 60:.0f} min"
    columns = ("stage", "lag", "in flight", f"finished, {window}", f"failed, {window}", "oldest in flight")
    output.print_table("pipeline", columns, rows)
