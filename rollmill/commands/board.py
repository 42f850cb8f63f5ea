"""`rollmill board`: the live board, served over HTTP on loopback."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from infra.arguments import PORT, FilePath
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.errors import ConfigError, RollmillError
from infra.heap import hold_flat
from infra.service import set_up_logging, until_stopped
from infra.side_by_side import first_error
from rollmill import output
from rollmill.paths import DATA_DIR


@click.command("board")
@click.option("--port", type=PORT, default=None, help="Port on loopback; that of `board.url` without it.")
@click.option(
    "--data",
    type=FilePath(directory=True),
    default=DATA_DIR / "board",
    show_default=True,
    help="Directory of Faust; nothing that matters is in it.",
)
@output.config_options
def command(port: int | None, data: Path, config: Config) -> None:
    """Follow `events` and serve the live board until stopped; needs the extra `board`."""
    set_up_logging()
    hold_flat()
    for chatty in ("faust", "mode"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    output.run(_serve(config, port or config.board.port, data.absolute()))


async def _serve(config: Config, port: int, data: Path) -> None:
    try:
        from infra.board.app import BoardService, Place  # noqa: PLC0415 - Faust is an extra
    except ImportError as error:
        raise ConfigError(f"the live board needs Faust: pip install 'rollmill[board]' ({error})") from error
    async with connected(config.bus, client="board") as bus:
        place = Place(port=port, datadir=data, memory_mb=config.board.memory_mb)
        board = BoardService(bus, SystemClock(), config.bus, place)
        try:
            await until_stopped(board.run())
        except* RollmillError as several:
            first = first_error(several)
            raise first from first.__cause__
