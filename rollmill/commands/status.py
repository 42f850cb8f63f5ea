"""`rollmill status`: lag, what is in flight in each stage and what it waits for, what stands still, what ended lately.

Shows the live board where one runs, and else reads the end of `events` itself; which service is away is in `control`.
It needs no other service to be alive.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich import box
from rich.table import Table
from rich.text import Text

from infra.board.view import InFlight, StageView
from infra.board.windows import WINDOWS_MS
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from rollmill import output
from rollmill.breakers import Standstill
from rollmill.standing import Standing, standing
from schemas.telemetry import EventKind

KINDS = (
    EventKind.FINISHED,
    EventKind.RETRIED,
    EventKind.FAILED,
    EventKind.EXPIRED,
    EventKind.CANCELLED,
    EventKind.DEAD,
)
"""Ends, in the order in which they are shown."""

NAMES = {"1m": "minute", "5m": "5 minutes", "1h": "hour"}
"""Windows, for a person."""


@click.command("status")
@click.option(
    "--window", type=click.Choice(list(WINDOWS_MS)), default="5m", show_default=True, help="How far `lately` reaches."
)
@output.json_option
@output.config_options
def command(window: str, as_json: bool, config: Config) -> None:
    """Show how the pipeline stands."""
    output.print_result(output.run(_status(config, window)), as_json, _show)


async def _status(config: Config, window: str) -> dict[str, Any]:
    clock = SystemClock()
    async with connected(config.bus, client="status") as bus:
        return described(await standing(bus, clock, config, WINDOWS_MS[window]), window)


def described(found: Standing, window: str) -> dict[str, Any]:
    """Return how the pipeline stands as plain values."""
    return {
        "window": window,
        "window_s": WINDOWS_MS[window] / 1000,
        "source": "events" if found.note else "board",
        "note": found.note,
        "behind": found.behind,
        "paused": [one.as_dict() for one in found.paused],
        "stages": _stages(found, window),
        "states": found.board.states,
        "dead": {"total": found.dead, "lately": found.dead_lately},
        "unreadable": found.board.unreadable,
        "forgotten": found.board.forgotten,
    }


def _stages(found: Standing, window: str) -> list[dict[str, Any]]:
    """Return each stage of the pipeline; of other services only what they ended, where they did."""
    lags = {lag.stage: lag for lag in found.lags}
    seen = {view.stage: view for view in found.board.stages}
    stages = []
    for name in dict.fromkeys((*lags, *seen)):
        view = seen.get(name, StageView(stage=name, counts={key: {} for key in WINDOWS_MS}))
        lag = lags.get(name)
        counts = view.counts[window]
        stages.append(
            {
                "stage": name,
                "lag": lag.lag if lag else None,
                "topics": lag.topics if lag else {},
                "in_flight": view.in_flight,
                **{kind.value: counts.get(kind.value, 0) for kind in KINDS},
                "oldest": asdict(view.oldest) if view.oldest else None,
                "windows": view.counts,
            }
        )
    return stages


def _show(result: dict[str, Any]) -> None:
    if result["note"]:
        _line(Text(result["note"], style="yellow"))
    for paused in result["paused"]:
        _line(Text(output.visible(str(Standstill(**paused))), style="red"))
    output.console.print(_table(result))
    oldest = {stage["stage"]: InFlight(**stage["oldest"]) for stage in result["stages"] if stage["oldest"]}
    if oldest:
        output.console.print(_oldest(oldest))
    states = ", ".join(f"{number} {state}" for state, number in result["states"].items())
    _line(Text(f"samples: {states or 'none seen'}"))
    dead = result["dead"]
    lately = NAMES[result["window"]]
    style = "red" if dead["lately"] else ""
    _line(Text(f"dead: {dead['total']} records, {dead['lately']} in the last {lately}", style=style))
    for what, meaning in (
        ("behind", "records of `events` not read yet"),
        ("unreadable", "records of `events` could not be read"),
        ("forgotten", "samples in flight were forgotten: too many, or a day old"),
    ):
        if result[what]:
            _line(Text(f"{result[what]} {meaning}", style="yellow"))


def _table(result: dict[str, Any]) -> Table:
    """Return the stages as a table that fits into 80 columns; rare kinds that did not occur are left out."""
    always = {EventKind.FINISHED, EventKind.RETRIED, EventKind.FAILED}
    kinds = [kind for kind in KINDS if kind in always or any(stage[kind.value] for stage in result["stages"])]
    table = Table(
        title=f"pipeline; ends in the last {NAMES[result['window']]}",
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("stage")
    for column in ("lag", "in flight", *(kind.value for kind in kinds)):
        table.add_column(column, justify="right")
    for stage in result["stages"]:
        # As text, not as rich's markup: a name from the log may hold anything.
        name, lag = Text(output.visible(stage["stage"])), "" if stage["lag"] is None else str(stage["lag"])
        table.add_row(name, lag, str(stage["in_flight"]), *(str(stage[kind.value] or "-") for kind in kinds))
    return table


def _oldest(oldest: dict[str, InFlight]) -> Table:
    """Return the oldest work of each stage: how old, which sample, who has it, what it waits for."""
    table = Table.grid(padding=(0, 2), collapse_padding=True)
    table.title, table.title_justify = "oldest in flight", "left"
    for stage, one in oldest.items():
        attempt = f", attempt {one.attempt}" if one.attempt else ""
        text = Text(output.visible(f"{one.run}/{one.group}/{one.sample}"), style="bold")
        text.append(output.visible(f"{attempt} on {one.worker}"), style="not bold")
        if one.waits_for:
            text.append(output.visible(f"\nwaits for {one.waits_for}"), style="not bold")
        table.add_row(Text(f" {output.visible(stage)}"), Text(_age(one.age_s), justify="right"), text)
    return table


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _line(text: Text) -> None:
    output.console.print(text, highlight=False)
