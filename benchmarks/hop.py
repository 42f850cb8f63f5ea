"""One hop: messages of 1 KB through one stage that does nothing, from Kafka to Kafka, with all that the product does.

Tasks lie in `tasks` before anything is measured. Each side (`hop_sides.py`) is a process that is started, connected and
held; then one after the other is let go and ended, alone. Its figure is messages per second from its first output to
the last one that counts, by the timestamps of the records: how long a process takes to start is no part of it. A side
counts only if those outputs are there once each and can be decoded. The slower ones get less to do, so that each works
for a second or two.

`no_events`: ours with the stage's setting `events = false`. `detail.cpu_us` is the time on a core per message, of each
side's process from its release to its end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.hop_sides import HELD
from benchmarks.kafka import local_kafka, log_with_topics
from benchmarks.result import Result, versus
from benchmarks.rounds import Series, interleaved
from benchmarks.simulated import FAMILY
from benchmarks.work import ends, make_tasks, publish
from infra.bus import Bus, Committed
from infra.clock import SystemClock
from infra.config import BusConfig
from infra.errors import ConfigError, WaitTimeout
from infra.reading import read_between
from infra.wire import unpack
from rollmill.services import has_faust
from rollmill.supervisor import Restart, Service, Supervisor
from rollmill.supervisor.readiness import says
from schemas import codec
from schemas.topics import EPISODES, TASKS

SETTINGS: dict[str, tuple[str, ...]] = {
    "ours": (),
    "no_events": ("--set", "init.events=false"),
    "bare": (),
    "faust": (),
}
"""Side -> what its command is given, beside where the log is."""

OURS = ("ours", "no_events")
"""Sides that are members of the group `init`."""

WARM_UP = "bare"
"""Side that runs once before all others: a fresh broker is slow at first."""

MESSAGE_BYTES = 1024
"""Size of a Task on the wire."""

START_LIMIT_S = 60.0
"""Longest wait for a side to be ready, seconds."""

LIMIT_S = 120.0
"""Longest wait for a side's outputs, seconds."""

LOOK_S = 0.05
"""The log is asked this often how many outputs there are, seconds."""

PUBLISHED_AT_ONCE = 500
"""Tasks that are published together."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int
    """Rounds of each side."""
    messages: Mapping[str, int]
    """Side -> messages that count in a round."""


QUICK = Plan(rounds=5, messages={"ours": 3000, "no_events": 3000, "bare": 6000, "faust": 2000})
FULL = Plan(rounds=7, messages={"ours": 10_000, "no_events": 10_000, "bare": 30_000, "faust": 5_000})


@dataclass
class Hop:
    """The log, the processes, and what they used."""

    bus: Bus
    supervisor: Supervisor
    plan: Plan
    cpu_us: dict[str, list[float]] = field(default_factory=dict)

    async def measured(self, side: str, number: int) -> float:
        """Return the messages per second of one side in one round."""
        name, wanted = process_name(side, number), self.plan.messages[side]
        if side in OURS:
            await rewind(self.bus)
        start = await ends(self.bus, EPISODES)
        pid = self.supervisor.kill(name, number=signal.SIGUSR1)
        cpu_s = cpu_seconds(pid)
        await self._outputs(sum(start.values()) + wanted, side)
        self.cpu_us.setdefault(side, []).append((cpu_seconds(pid) - cpu_s) / wanted * 1e6)
        self.supervisor.kill(name, number=signal.SIGTERM)
        await self.supervisor.ended(name)
        end = await ends(self.bus, EPISODES)
        outputs = [record async for record in read_between(self.bus, SystemClock(), start, end)]
        outputs = sorted(outputs, key=lambda record: record.timestamp_ms)[:wanted]
        rows = {(await unpack(EPISODES, record)).message.task.row for record in outputs}
        assert len(rows) == wanted, f"{side} gave {len(rows)} different outputs, not {wanted}"
        return per_second([record.timestamp_ms for record in outputs])

    async def _outputs(self, total: int, side: str) -> None:
        """Return as soon as so many records are on `episodes`."""
        until = time.monotonic() + LIMIT_S
        while (there := sum((await ends(self.bus, EPISODES)).values())) < total:
            if time.monotonic() > until:
                raise WaitTimeout(f"waited {LIMIT_S:g} s for the outputs of {side}; {total - there} are missing")
            await asyncio.sleep(LOOK_S)


async def rewind(bus: Bus) -> None:
    """Let the group `init` begin at the first record again; no member of it may be left."""
    await bus.commit("init", dict.fromkeys(await ends(bus, TASKS), Committed(0)))


def per_second(timestamps_ms: Sequence[int]) -> float:
    """Return the rate of records from the first one to the last one.

    Raises:
        ValueError: they all came within a millisecond, which tells nothing.
    """
    length_ms = max(timestamps_ms) - min(timestamps_ms)
    if length_ms <= 0:
        raise ValueError(f"{len(timestamps_ms)} records within a millisecond: give the side more work")
    return (len(timestamps_ms) - 1) / length_ms * 1000


def cpu_seconds(pid: int) -> float:
    """Return the time that a process spent on a core so far, its threads included."""
    # Behind the name of the program, which may hold blanks and brackets: fields 14 and 15 of proc(5).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def payloads(messages: int) -> list[dict[str, Any]]:
    """Return payloads that make Tasks of MESSAGE_BYTES."""
    empty = {"init_s": 0.0, "index": 0, "text": ""}
    (task,) = make_tasks("hop", [empty], family=FAMILY)
    # Beyond 255 characters the length of a text takes two bytes more.
    text = "y" * (MESSAGE_BYTES - len(codec.encode(task)) - 2)
    return [{**empty, "index": index, "text": text} for index in range(messages)]


def process_name(side: str, number: int) -> str:
    """Return the name of the process of a side in a round."""
    return f"{side}-{number}"


def measure(*, quick: bool) -> Result:
    """Measure a hop."""
    if not has_faust():
        raise ConfigError("hop is measured against Faust: pip install 'rollmill[board]'")
    with local_kafka("hop.") as config:
        return asyncio.run(_measure(config, QUICK if quick else FULL))


async def _measure(config: BusConfig, plan: Plan) -> Result:
    async with log_with_topics(config) as bus, sides(config, plan.rounds) as supervisor:
        tasks = make_tasks("hop", payloads(max(plan.messages.values())), family=FAMILY)
        for at in range(0, len(tasks), PUBLISHED_AT_ONCE):
            await publish(bus, tasks[at : at + PUBLISHED_AT_ONCE])
        hop = Hop(bus, supervisor, plan)
        await hop.measured(WARM_UP, plan.rounds)
        hop.cpu_us.clear()
        figures = await interleaved({side: partial(hop.measured, side) for side in SETTINGS}, rounds=plan.rounds)
    ours, bare = figures["ours"], figures["bare"]
    return Result(
        name="hop",
        ours=ours.median,
        rival=bare.median,
        unit="messages/s",
        ratio=ours.median / bare.median,
        detail={
            "spread": {"ours": ours.spread(), "rival": bare.spread()},
            "no_events": versus(figures["no_events"], bare, unit="messages/s"),
            "faust": versus(ours, figures["faust"], unit="messages/s"),
            "cpu_us": {side: Series(tuple(values)).median for side, values in hop.cpu_us.items()},
            "messages": dict(plan.messages),
            "message_bytes": len(codec.encode(tasks[0])),
        },
    )


@asynccontextmanager
async def sides(config: BusConfig, rounds: int) -> AsyncIterator[Supervisor]:
    """Start every side's processes, one a round, until the block is left; it begins when all are held.

    WARM_UP has one more, with the number behind the last round's.
    """
    log = ("--set", f"bus.bootstrap={config.bootstrap}", "--set", f'bus.prefix="{config.prefix}"')
    services = [
        Service(
            name=process_name(side, number),
            argv=(sys.executable, "-m", "benchmarks.hop_sides", side, *log, *settings),
            ready=says(HELD, limit_s=START_LIMIT_S),
            restart=Restart.NEVER,
        )
        for side, settings in SETTINGS.items()
        for number in range(rounds + (side == WARM_UP))
    ]
    with tempfile.TemporaryDirectory(prefix="rollmill-benchmark-") as folder:
        async with Supervisor(services, run_dir=Path(folder)) as supervisor, asyncio.TaskGroup() as group:
            await supervisor.start()
            watching = group.create_task(supervisor.wait())
            yield supervisor
            watching.cancel()
