"""`rollmill reaper`: ends samples whose time ran out."""

from __future__ import annotations

import click

from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.heap import hold_flat
from infra.service import set_up_logging, until_stopped
from producers.reaper import Reaper
from rollmill import output


@click.command("reaper")
@output.config_options
def command(config: Config) -> None:
    """End samples whose time ran out."""
    set_up_logging()
    hold_flat()
    output.run(_serve(config))


async def _serve(config: Config) -> None:
    async with connected(config.bus, client="reaper") as bus:
        await until_stopped(Reaper(bus, SystemClock()).run())
