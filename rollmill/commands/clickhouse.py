"""`rollmill clickhouse`: ClickHouse's HTTP interface over a local directory (chDB inside)."""

from __future__ import annotations

from pathlib import Path

import click

from infra.arguments import PORT, FilePath
from infra.errors import ConfigError
from infra.service import set_up_logging
from rollmill import output
from rollmill.paths import DATA_DIR


@click.command("clickhouse")
@click.option(
    "--data",
    type=FilePath(directory=True),
    default=DATA_DIR / "clickhouse",
    show_default=True,
    help="Directory of the tables; one server at a time.",
)
@click.option("--port", type=PORT, default=8123, show_default=True, help="Port on loopback; 0 for a free one.")
@click.option("--password", envvar="ROLLMILL_CLICKHOUSE__PASSWORD", default="", help="Password of user `default`.")
def command(data: Path, port: int, password: str) -> None:
    """Serve until stopped. With a real ClickHouse server set `clickhouse.url` instead."""
    try:
        from infra.clickhouse.local_server.server import serve  # noqa: PLC0415 - needs the extra `local`
    except ImportError as error:
        raise ConfigError(f"the local ClickHouse needs chDB: pip install 'rollmill[local]' ({error})") from error
    set_up_logging()
    data.mkdir(parents=True, exist_ok=True)
    try:
        output.run(serve(data, "127.0.0.1", port, password=password, ready=_say))
    except OSError as error:
        raise ConfigError(f"cannot listen on 127.0.0.1:{port}: {error.strerror}; choose another --port") from error


def _say(url: str) -> None:
    click.echo(f"ClickHouse at {url}")
