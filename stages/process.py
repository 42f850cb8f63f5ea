"""One stage as one process: `python -m stages.run --config FILE --set a.b=c`.

Connects to the log, checks that the topics are as the table says, joins the stage's consumer group and works until a
signal asks it to finish. With `--only TOPIC:PARTITION:OFFSET` it works on that record alone, in no group, and ends:
so a worker runs what may have killed workers before.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import click

from infra.arguments import FilePath
from infra.bus import Bus, TopicPartition
from infra.clock import Clock, SystemClock
from infra.config import Config, StageConfig, load
from infra.connect import connected
from infra.guard import Guards
from infra.heap import hold_flat
from infra.isolation import CODES, Alone, ChildProcess, tell_begun
from infra.service import run_service, set_up_logging, until_stopped, worker_name
from infra.stage import In, Member, Out, Outages, Stage
from infra.wire import Publisher


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a stage's process is made in."""

    bus: Bus
    """The log."""
    clock: Clock
    """Time."""
    config: Config
    """All settings."""
    worker: str
    """This process's name in events and records."""
    alone: Alone | None
    """Runs a record in a process of its own; None in such a process."""

    def member(
        self, stage: Stage[In, Out], config: StageConfig, *, first: bool = False, outages: Outages | None = None
    ) -> Member:
        """Return a member of a stage's group, of these settings; `first` and `outages` as for `infra.stage.Member`."""
        return Member(
            stage,
            self.bus,
            self.clock,
            worker=self.worker,
            limits=config.limits(),
            first=first,
            alone=self.alone,
            outages=outages,
            tells=config.events,
        )


def guards_of(around: Surroundings, stage: str) -> Guards:
    """Return the guards of what a stage's process calls."""
    publisher = Publisher(around.bus, around.clock, around.worker)
    return Guards(publisher, around.clock, stage=stage, worker=around.worker, limits=around.config.breaker.limits())


MakeMember = Callable[[Surroundings], AbstractAsyncContextManager[Member]]
"""Connects a stage to what it needs, for as long as its member works."""


def stage_command(name: str, make: MakeMember) -> click.Command:
    """Return the command line of a stage's process."""

    @click.command(name, help=f"Run one {name.upper()} worker.")
    @click.option("--config", "path", type=FilePath(), help="TOML file with settings.")
    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Overrides a setting.")
    @click.option("--only", "place", metavar="TOPIC:PARTITION:OFFSET", help="Work on this record and end.")
    def command(path: Path | None, overrides: tuple[str, ...], place: str | None) -> None:
        set_up_logging()
        hold_flat()
        only = None if place is None else _place(place)

        async def main() -> None:
            config = load(path, overrides)
            async with connected(config.bus, client=name) as bus:
                # The same command again, however it was called.
                alone = ChildProcess(sys.orig_argv[1:]) if only is None else None
                around = Surroundings(
                    bus=bus, clock=SystemClock(), config=config, worker=worker_name(name), alone=alone
                )
                async with make(around) as member:
                    if only is None:
                        await until_stopped(member.run(), member.stop)
                    else:
                        await until_stopped(member.run_only(*only, begun=tell_begun))

        raise SystemExit(run_service(main, codes={} if only is None else CODES))

    return command


def _place(text: str) -> tuple[TopicPartition, int]:
    place = re.fullmatch(r"([a-z0-9._-]{1,200}):([0-9]{1,9}):([0-9]{1,18})", text)
    if place is None:
        raise click.BadParameter(f"{text[:80]!r} is no place; expected TOPIC:PARTITION:OFFSET, such as tasks:0:17")
    return TopicPartition(place[1], int(place[2])), int(place[3])
