"""`rollmill envhost`: serves environments of all installed families, and closes those of cancelled samples."""

from __future__ import annotations

import asyncio
import signal

import click

from infra.arguments import TEXT
from infra.cancellation import Cancellation
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.envhost.host import HostLimits
from infra.envhost.server import serve
from infra.heap import hold_flat
from infra.service import set_up_logging
from rollmill import output
from stages.handlers.registry import environment


@click.command("envhost")
@click.option("--address", type=TEXT, default=None, help="Where to listen: `unix:/path` or `http://HOST:PORT`.")
@output.config_options
def command(address: str | None, config: Config) -> None:
    """Serve environments until stopped."""
    set_up_logging()
    hold_flat()
    output.run(_serve(address or config.envhost.address, config))


async def _serve(address: str, config: Config) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    limits, clock = HostLimits(capacity=config.envhost.capacity), SystemClock()
    async with connected(config.bus, client="envhost") as bus:
        cancellation = Cancellation(bus, clock)
        # Environments are work in progress: an outage of the log must not cost them, so the host goes on without it.
        async with cancellation.following_on():
            await serve(
                address, environment, stop=stop, clock=clock, limits=limits, started=_say, cancellation=cancellation
            )


def _say(address: str) -> None:
    click.echo(f"environment host at {address}")
