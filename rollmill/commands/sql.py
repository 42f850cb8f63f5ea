"""`rollmill sql QUERY`: asks ClickHouse and prints the rows; it changes nothing."""

from __future__ import annotations

from typing import Any

import click

from infra.arguments import Number
from infra.clickhouse.question import LIMIT_S, LONGEST_S, MAX_ROWS, ask
from infra.config import Config
from rollmill import output, store


@click.command("sql")
@click.argument("query")
@click.option(
    "--limit",
    "limit_s",
    default=LIMIT_S,
    show_default=True,
    type=Number(0.1, LONGEST_S),
    help="Longest time for the answer, seconds; then the query is stopped.",
)
@output.json_option
@output.config_options
def command(query: str, limit_s: float, as_json: bool, config: Config) -> None:
    """Ask ClickHouse; the tables are those of `SHOW TABLES`.

    One statement that reads: it is sent with `readonly = 1`, and nothing else is sent at all. Ctrl-C stops it on the
    server too. With --json numbers that JSON has not (NaN, infinity) are null, as in ClickHouse's own JSON formats.
    """
    found = output.run(ask(store.address(config), query, limit_s=limit_s))
    output.print_result({"columns": found.columns, "rows": found.rows}, as_json, _show)


command.help = f"{command.help}\n\nAn answer has at most {MAX_ROWS:,} rows."


def _show(result: dict[str, Any]) -> None:
    output.print_rows(result["columns"], result["rows"])
