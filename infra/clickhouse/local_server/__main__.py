"""`python -m infra.clickhouse.local_server`: the service as a process of its own."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import click

from infra.arguments import PORT, FilePath
from infra.clickhouse.local_server.server import serve
from infra.errors import RollmillError


@click.command()
@click.option("--path", type=FilePath(directory=True), required=True, help="Data directory.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Loopback address to listen on.")
@click.option("--port", type=PORT, default=8123, show_default=True, help="Port; 0 takes a free one.")
@click.option("--password", default="", envvar="ROLLMILL_CLICKHOUSE__PASSWORD", help="Password of user `default`.")
def main(path: Path, host: str, port: int, password: str) -> None:
    """Serve ClickHouse's HTTP interface over chDB until SIGTERM."""
    logging.basicConfig(level=logging.INFO)
    try:
        asyncio.run(serve(path, host, port, password=password, ready=lambda url: click.echo(f"listening on {url}")))
    except (RollmillError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
