"""Where the time of a hop goes: `python -m benchmarks.hop_profile [--page docs/hop.md]`.

One INIT member with a handler that does nothing (`hop.py` measures the same) works through tasks on a real Kafka, in
this process; again and again in its time on a core the frame that is at work is counted, by a signal and not by
tracing, so that small functions cost no more than they do. Each frame belongs to a part by its file.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from benchmarks.hop import PUBLISHED_AT_ONCE, payloads
from benchmarks.kafka import local_kafka, log_with_topics
from benchmarks.report import machine
from benchmarks.simulated import FAMILY, Simulated
from benchmarks.work import ends, make_tasks, publish
from infra.bus import Bus
from infra.clock import SystemClock
from infra.config import BusConfig, StageConfig
from infra.connect import connected
from infra.stage import Member
from schemas.topics import EPISODES
from stages.wiring import init_stage

PAGE = Path(__file__).parent.parent / "docs" / "hop.md"
"""Where the figures go."""

MESSAGES = 30_000
"""Messages of a profile: some ten seconds."""

EVERY_S = 0.001
"""Time on a core between two samples, seconds; the kernel may take them more rarely, at each of its ticks."""

LOOK_S = 0.25
"""The log is asked this often how many outputs there are, seconds."""

LIMIT_S = 300.0
"""Longest wait for them, seconds."""

SHOWN = 12
"""So many functions are shown."""

PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("client: producer", ("aiokafka/producer/", "aiokafka/record/")),
    ("client: consumer", ("aiokafka/consumer/", "infra/kafka_consumer", "infra/kafka_headers", "infra/kafka_progress")),
    ("client: connections and protocol", ("aiokafka/", "infra/kafka")),
    ("codec, headers, keys", ("schemas/", "msgspec/", "msgpack/", "infra/wire")),
    ("offsets and their map", ("infra/offset",)),
    ("events and metrics", ("infra/events", "infra/middleware/events", "infra/vitals")),
    ("worker and middleware", ("infra/",)),
    ("event loop", ("asyncio/", "selectors.py", "concurrent/", "threading.py", "contextlib.py")),
    ("handler", ("benchmarks/", "stages/")),
)
"""Part -> beginnings of its files; the first part that fits counts."""


class Samples:
    """What was at work, how often."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()

    def take(self, _: int, frame: FrameType | None) -> None:
        """Count a frame; called by the signal."""
        if frame is None:
            return
        place = _within(frame.f_code.co_filename)
        self.parts[_part(place)] += 1
        self.functions[f"{place}: {frame.f_code.co_qualname}"] += 1

    @property
    def total(self) -> int:
        """Samples taken."""
        return self.parts.total()


@contextmanager
def sampled() -> Iterator[Samples]:
    """Sample this process while the block runs."""
    samples = Samples()
    before = signal.signal(signal.SIGPROF, samples.take)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    try:
        yield samples
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _within(file: str) -> str:
    """Return a file's path within its package or the checkout."""
    for root in ("site-packages/", f"{Path(__file__).parent.parent}/", "/lib/python3."):
        _, found, rest = file.rpartition(root)
        if found:
            return rest.split("/", 1)[-1] if root.startswith("/lib/python3") else rest
    return file


def _part(place: str) -> str:
    return next((part for part, begins in PARTS if place.startswith(begins)), "the rest")


async def profile(config: BusConfig, messages: int) -> tuple[Samples, float]:
    """Return samples of a member at work, and its seconds on a core per message."""
    async with log_with_topics(config) as log:
        tasks = make_tasks("hop", payloads(messages), family=FAMILY)
        for at in range(0, len(tasks), PUBLISHED_AT_ONCE):
            await publish(log, tasks[at : at + PUBLISHED_AT_ONCE])
        clock = SystemClock()
        async with connected(config, client="init") as bus:
            stage = init_stage(Simulated(clock, "profiled").init)
            member = Member(stage, bus, clock, worker="profiled", limits=StageConfig().limits(), first=True)
            working = asyncio.create_task(member.run())
            began_s = time.process_time()
            with sampled() as samples:
                await _outputs(log, messages, working)
            cpu_s = time.process_time() - began_s
            member.stop()
            await working
    return samples, cpu_s / messages


async def _outputs(log: Bus, messages: int, working: asyncio.Task[None]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while sum((await ends(log, EPISODES)).values()) < messages:
            assert not working.done(), "the member ended early"
            await asyncio.sleep(LOOK_S)


def page(samples: Samples, cpu_s: float, taken: str) -> str:
    """Return the figures for a person."""

    def rows(counted: Counter[str], most: int | None = None) -> str:
        return "\n".join(
            f"| {name} | {count / samples.total:.1%} | {count / samples.total * cpu_s * 1e6:.0f} |"
            for name, count in counted.most_common(most)
        )

    return f"""# Where the time of a hop goes

Written by `python -m benchmarks.hop_profile`; do not edit. One INIT worker whose handler does nothing, {MESSAGES}
messages of 1 KB on a real Kafka: {cpu_s * 1e6:.0f} us on a core for each.

| part | share | us per message |
|---|---|---|
{rows(samples.parts)}

| function | share | us per message |
|---|---|---|
{rows(samples.functions, SHOWN)}

{taken}

## What was tried

- Limits share one timer (`infra/shared_timer.py`); `asyncio.timeout` makes and cancels one for each, which cost as much
  as encoding a record.
- What is made per record is a Struct, not a frozen dataclass; a record is fewer tasks on the loop; the collector of
  circular garbage looks seldom. With the timer these took the figure against a bare loop from 0.22 to 0.43.
- Reading records typed at once (`msgspec.msgpack`, no maps in between) was built and taken back: it takes bytes in
  fields that no reader knows which every other reader refuses. The bare loop uses this codec, too, so a faster one
  would help it as much.
- What is left is spread thin: per record a job, a map entry, an event at its start and at its end, headers, a key, an
  acknowledgement that is waited for. A loop that does none of this is the rival of `python -m benchmarks hop`.
"""


@click.command("hop_profile")
@click.option(
    "--page", "target", type=click.Path(path_type=Path, dir_okay=False), default=PAGE, help="Where the page is written."
)
def command(target: Path) -> None:
    """Profile a hop and write the page."""
    before = machine()
    with local_kafka("hop.") as config:
        samples, cpu_s = asyncio.run(profile(config, MESSAGES))
    taken = (
        f"Taken on {before['cores']} cores, Python {before['python']}, load {before['load_1m']} before and "
        f"{machine()['load_1m']} after; {samples.total} samples."
    )
    target.write_text(page(samples, cpu_s, taken), encoding="utf-8")
    click.echo(target)


if __name__ == "__main__":
    command()
