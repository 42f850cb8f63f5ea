"""What commands share: their options, how they run, and how they print.

A result is a table for a person, or with `--json` one JSON object last on standard output; whatever else is said goes
to standard error. No command is known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infra import plain_text
from infra.arguments import FilePath
from infra.config import load
from rollmill.json_line import json_line
from rollmill.paths import CONFIG_NAME, DATA_DIR
from trainer import presets

T = TypeVar("T")

console = Console()
"""For results."""

errors = Console(stderr=True)
"""For what is said beside them."""

visible = plain_text.visible
"""For text of others, before it is printed."""


def safe(text: object) -> str:
    """Return text of anybody for our terminal: one line, obeyed neither by it nor as markup."""
    return escape(visible(str(text)))


def iso(at_ms: int, timespec: str = "seconds") -> str:
    """Return a time, milliseconds since the epoch, as ISO 8601 in UTC."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec=timespec)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json` to a command."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object last; of an error, what it says."
    )(command)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--config` and `--set` to a command, which receives `config: Config`."""

    @_settings("Override a setting.")
    @wraps(command)
    def configured(*args: Any, config_path: Path | None, overrides: Sequence[str], **kwargs: Any) -> Any:
        return command(*args, config=load(config_path or local_config(), overrides), **kwargs)

    return configured


def config_and_rules_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the same to a command that also receives `rules`: the overrides whose key has no section, as `filter=off`."""

    @_settings("Override a setting (`bus.bootstrap=...`), or a rule of the run (`filter=off`, `max_lag=4`).")
    @wraps(command)
    def configured(*args: Any, config_path: Path | None, overrides: Sequence[str], **kwargs: Any) -> Any:
        rules = tuple(one for one in overrides if "." not in one.partition("=")[0])
        settings = [one for one in overrides if one not in rules]
        return command(*args, config=load(config_path or local_config(), settings), rules=rules, **kwargs)

    return configured


def _settings(help_: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=help_)(command)
        return click.option(
            "--config",
            "config_path",
            type=FilePath(),
            envvar="ROLLMILL_CONFIG",
            help="TOML file with settings; without it the services that `rollmill up` started here are used.",
        )(command)

    return decorate


def preset_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--preset` to a command that reads RUN.toml."""
    known = "; ".join(f"{name}: {presets.summary(name)}" for name in presets.names())
    text = f"Begin from these values, whatever `preset` RUN.toml names; its own values win. {known}"
    return click.option("--preset", metavar="NAME", help=text)(command)


def local_config() -> Path | None:
    """Return the configuration that `rollmill up` wrote here: where its services listen; None if there is none."""
    path = DATA_DIR / CONFIG_NAME
    return path if path.exists() else None


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine."""
    return asyncio.run(work)


def print_result(result: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Print a result: as one JSON line, or as `show` does."""
    if as_json:
        click.echo(json_line(result))
    else:
        show(result)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows for a person; a cell that is too wide goes on in the next line, for half a name helps nobody."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows of any shape: as a table, or each by itself where a table would not fit the terminal."""
    widths = (
        [max(len(column), *(len(str(row[at])) for row in rows)) for at, column in enumerate(columns)] if rows else []
    )
    if sum(width + 3 for width in widths) <= console.width:
        print_table("", columns, [[safe(cell) for cell in row] for row in rows])
        return
    name_width = max(len(column) for column in columns)
    for number, row in enumerate(rows, 1):
        console.print(f"[bold]row {number}[/]")
        for column, cell in zip(columns, row, strict=True):
            console.print(f"  {column:<{name_width}}  {safe(cell)}", highlight=False)
