"""`rollmill sql QUERY`: asks ClickHouse and prints the rows."""

from __future__ import annotations

from typing import Any

import click
from clickhouse_connect.driver.exceptions import ClickHouseError

from infra.clickhouse.client import connect, explained
from infra.config import Config
from rollmill import output, store


@click.command("sql")
@click.argument("query")
@output.json_option
@output.config_options
def command(query: str, as_json: bool, config: Config) -> None:
    """Ask ClickHouse; the tables are those of `SHOW TABLES`."""
    result = output.run(_ask(query, config))
    output.print_result(result, as_json, _show)


async def _ask(query: str, config: Config) -> dict[str, Any]:
    client = await connect(store.address(config))
    try:
        found = await client.query(query)
    except ClickHouseError as error:
        raise explained(error, f"asking {query!r}") from error
    finally:
        await client.close()
    return {"columns": list(found.column_names), "rows": [list(row) for row in found.result_rows]}


def _show(result: dict[str, Any]) -> None:
    output.print_rows(result["columns"], result["rows"])
