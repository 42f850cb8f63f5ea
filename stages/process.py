"""One stage as one process: `python -m stages.run --config FILE --set a.b=c`.

Connects to the log, checks that the topics are as the table says, joins the stage's consumer group and works until a
signal asks it to finish.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import click

from infra.bus import Bus
from infra.clock import Clock, SystemClock
from infra.config import Config, load
from infra.connect import connected
from infra.service import run_service, set_up_logging, until_stopped, worker_name
from infra.stage import Member

Work = Callable[[Bus, Clock, Config, str], Awaitable[None]]
"""(bus, clock, configuration, worker name) -> runs one member until it is stopped."""


def stage_command(name: str, work: Work) -> click.Command:
    """Return the command line of a stage's process."""

    @click.command(name, help=f"Run one {name.upper()} worker.")
    @click.option("--config", "path", type=click.Path(path_type=Path), help="TOML file with settings.")
    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Overrides a setting.")
    def command(path: Path | None, overrides: tuple[str, ...]) -> None:
        set_up_logging()

        async def main() -> None:
            config = load(path, overrides)
            async with connected(config.bus, client=name) as bus:
                await work(bus, SystemClock(), config, worker_name(name))

        raise SystemExit(run_service(main))

    return command


async def run_member(member: Member) -> None:
    """Run one member until a signal asks it to stop."""
    await until_stopped(member.run(), member.stop)
