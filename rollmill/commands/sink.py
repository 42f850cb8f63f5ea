"""`rollmill sink`: writes the topics to ClickHouse, exactly once."""

from __future__ import annotations

import click

from infra.clickhouse.sink import Sink
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.heap import hold_flat
from infra.service import set_up_logging, until_stopped
from rollmill import output, store


@click.command("sink")
@output.config_options
def command(config: Config) -> None:
    """Write the topics to ClickHouse until stopped."""
    set_up_logging()
    hold_flat()
    output.run(_serve(config))


async def _serve(config: Config) -> None:
    async with connected(config.bus, client="sink") as bus:
        sink = Sink(bus, store.address(config), SystemClock())
        await until_stopped(sink.run(), sink.stop)
