"""`rollmill status`: lag, what is in flight in each stage and what it waits for, what stands still, what ended lately.

What the guards of trainers noticed lately comes first. Shows the live board where one runs, and else reads the end of
`events` itself; which service is away is in `control`. It needs no other service to be alive.
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
from rollmill.lag import StageLag
from rollmill.standing import Standing, standing
from schemas.decisions import Alarm
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

MOST_ALARMS = 5
"""Alarms of trainers that are shown to a person, the newest."""

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
    found = output.run(_standing(config, window))
    output.print_result(described(found, window), as_json, lambda _: show(found, window))


async def _standing(config: Config, window: str) -> Standing:
    clock = SystemClock()
    async with connected(config.bus, client="status") as bus:
        return await standing(bus, clock, config, WINDOWS_MS[window])


def stages_of(found: Standing) -> list[tuple[StageView, StageLag | None]]:
    """Return each stage of the pipeline; of other services only what they ended, where they did: those have no lag."""
    lags = {lag.stage: lag for lag in found.lags}
    seen = {view.stage: view for view in found.board.stages}
    idle: dict[str, dict[str, int]] = {key: {} for key in WINDOWS_MS}
    return [
        (seen.get(name, StageView(stage=name, counts=idle)), lags.get(name)) for name in dict.fromkeys((*lags, *seen))
    ]


def described(found: Standing, window: str) -> dict[str, Any]:
    """Return how the pipeline stands as plain values, for programs."""
    return {
        "window": window,
        "window_s": WINDOWS_MS[window] / 1000,
        "source": "events" if found.note else "board",
        "note": found.note,
        "behind": found.behind,
        "paused": [one.as_dict() for one in found.paused],
        "alarms": [_alarm(one) for one in found.alarms],
        "stages": [_described(view, lag, window) for view, lag in stages_of(found)],
        "states": found.board.states,
        "dead": {"total": found.dead, "lately": found.dead_lately},
        "unreadable": found.board.unreadable,
        "forgotten": found.board.forgotten,
    }


def _alarm(alarm: Alarm) -> dict[str, Any]:
    return {name: getattr(alarm, name) for name in ("run", "step", "guard", "value", "bound", "action", "cause")}


def _described(view: StageView, lag: StageLag | None, window: str) -> dict[str, Any]:
    return {
        "stage": view.stage,
        "lag": lag.lag if lag else None,
        "topics": lag.topics if lag else {},
        "in_flight": view.in_flight,
        **{kind.value: view.counts[window].get(kind.value, 0) for kind in KINDS},
        "oldest": asdict(view.oldest) if view.oldest else None,
        "windows": view.counts,
    }


def show(found: Standing, window: str) -> None:
    """Print how the pipeline stands, for a person."""
    if found.note:
        _line(Text(found.note, style="yellow"))
    for paused in found.paused:
        _line(Text(output.visible(str(paused)), style="red"))
    for alarm in found.alarms[-MOST_ALARMS:]:
        _line(Text(output.visible(str(alarm)), style="red"))
    output.console.print(_table(found, window))
    oldest = {view.stage: view.oldest for view, _ in stages_of(found) if view.oldest}
    if oldest:
        output.console.print(_oldest(oldest))
    states = ", ".join(f"{number} {state}" for state, number in found.board.states.items())
    _line(Text(f"samples: {states or 'none seen'}"))
    style = "red" if found.dead_lately else ""
    _line(Text(f"dead: {found.dead} records, {found.dead_lately} in the last {NAMES[window]}", style=style))
    for number, meaning in (
        (found.behind, "records of `events` not read yet"),
        (found.board.unreadable, "records of `events` could not be read"),
        (found.board.forgotten, "samples in flight were forgotten: too many, or a day old"),
    ):
        if number:
            _line(Text(f"{number} {meaning}", style="yellow"))


def _table(found: Standing, window: str) -> Table:
    """Return the stages as a table that fits into 80 columns; rare kinds that did not occur are left out."""
    stages = stages_of(found)
    always = {EventKind.FINISHED, EventKind.RETRIED, EventKind.FAILED}
    kinds = [kind for kind in KINDS if kind in always or any(view.counts[window].get(kind.value) for view, _ in stages)]
    table = Table(
        title=f"pipeline; ends in the last {NAMES[window]}",
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("stage")
    for column in ("lag", "in flight", *(kind.value for kind in kinds)):
        table.add_column(column, justify="right")
    for view, lag in stages:
        ends = (str(view.counts[window].get(kind.value) or "-") for kind in kinds)
        # As text, not as rich's markup: a name from the log may hold anything.
        name = Text(output.visible(view.stage))
        table.add_row(name, "" if lag is None else str(lag.lag), str(view.in_flight), *ends)
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
