"""One, two, four and eight RUN workers on a real Kafka, a process each, with the product's defaults.

Episodes wait for as long as their payload says (lognormal, seeded), as on a policy that is elsewhere; they lie in
`episodes` directly, so that RUN alone is measured. A window opens when a full load of all slots waits, and closes when
the first worker has taken its last episode: until then every worker has work waiting. The figure is episodes per second
in the window: the slots that are busy, on average, with what an episode is meant to last, divided by its mean
(`backlog.py` says what counts as lost). `rival` is linear growth: eight times the figure of one worker.

Every other round goes from eight workers down to one.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.backlog import Span, backlog_window, busy_slots
from benchmarks.kafka import local_kafka, log_with_topics
from benchmarks.result import Result
from benchmarks.rounds import interleaved
from benchmarks.simulated import FAMILY
from benchmarks.stage_processes import simulated_stages
from benchmarks.work import collect, ends, episodes, make_tasks, messages, publish_to
from infra.bus import Bus
from infra.config import Config
from schemas.topics import EPISODES, ROLLOUTS

SIZES = (1, 2, 4, 8)
"""Numbers of workers; each at least doubles the one before."""

SEED = 20_250_302
"""Of the waits; each round adds its number."""

SIGMA = 0.5
"""Of the logarithm of a wait."""

MEDIAN_S = 1.0
"""Median wait, seconds; short beside a real episode's minutes, which is the harder case."""

LONGEST_S = 4.0
"""Waits are cut off here, so that a round ends."""

TOKENS = 256
"""Tokens of an episode's transcript."""

LOADS = {True: 4, False: 20}
"""Quick or not -> episodes per slot."""

ROUNDS = {True: 1, False: 3}
"""Quick or not -> rounds."""

LIMIT_S = 180.0
"""Longest wait for the rollouts of a size, seconds."""


@dataclass
class Workers:
    """RUN workers that come and go; their group shares the work anew each time."""

    config: Config
    stack: AsyncExitStack
    batches: list[tuple[int, AsyncExitStack]] = field(default_factory=list)
    """How many were started together, and what ends them."""

    async def become(self, size: int) -> None:
        """Start or end workers until there are so many."""
        while sum(count for count, _ in self.batches) > size:
            await self.batches.pop()[1].aclose()
        missing = size - sum(count for count, _ in self.batches)
        if missing:
            batch = await self.stack.enter_async_context(AsyncExitStack())
            await batch.enter_async_context(simulated_stages(self.config.bus, {"run": missing}))
            self.batches.append((missing, batch))


@dataclass
class Scaling:
    """The log, the workers, and the windows that were seen."""

    bus: Bus
    workers: Workers
    loads: int
    windows_s: dict[int, list[float]] = field(default_factory=dict)

    async def measured(self, size: int, number: int) -> float:
        """Return the episodes per second of so many workers, in a round."""
        await self.workers.become(size)
        slots = size * self.workers.config.run.max_in_flight
        tasks = make_tasks(f"scaling-{size}-{number}", waits(SEED + number, slots * self.loads), family=FAMILY)
        queue, done = await ends(self.bus, EPISODES), await ends(self.bus, ROLLOUTS)
        await publish_to(self.bus, EPISODES, episodes(tasks))
        rollouts = await messages(ROLLOUTS, await collect(self.bus, ROLLOUTS, done, tasks, limit_s=LIMIT_S))
        queued = await collect(self.bus, EPISODES, queue, tasks, limit_s=LIMIT_S)
        began: dict[str, list[float]] = {}
        spans = []
        for rollout in rollouts.values():
            at = rollout.verdict["began_ms"] / 1000
            began.setdefault(rollout.worker, []).append(at)
            spans.append(Span(at, at + rollout.task.payload["run_s"]))
        assert len(began) == size, f"{len(began)} workers took work, of {size}"
        window = window_of([record.timestamp_ms / 1000 for record in queued.values()], began.values(), slots=slots)
        self.windows_s.setdefault(size, []).append(window.length)
        return busy_slots(spans, window) / statistics.fmean(span.length for span in spans)


def window_of(arrived: Iterable[float], began: Iterable[list[float]], *, slots: int) -> Span:
    """Return the span in which work waited for every worker.

    Args:
        arrived: when each job came into the queue.
        began: for each worker, when it took its jobs.
        slots: how many jobs are worked on at once, by all.

    Raises:
        ValueError: there is none.
    """
    taken = list(began)
    window = Span(backlog_window(list(arrived), [at for each in taken for at in each], slots=slots).start, 0.0)
    window = window._replace(stop=min(max(each) for each in taken))
    if window.length <= 0:
        raise ValueError("a worker was without work before a full load waited: give them more, or spread it evenly")
    return window


def waits(seed: int, jobs: int) -> list[dict[str, Any]]:
    """Return the payloads of episodes."""
    draw = random.Random(seed)
    return [
        {"run_s": min(LONGEST_S, MEDIAN_S * draw.lognormvariate(0, SIGMA)), "tokens": TOKENS, "index": index}
        for index in range(jobs)
    ]


def measure(*, quick: bool) -> Result:
    """Measure how RUN grows."""
    with local_kafka("scaling.") as config:
        return asyncio.run(_measure(Config(bus=config), quick=quick))


async def _measure(config: Config, *, quick: bool) -> Result:
    async with log_with_topics(config.bus) as bus, AsyncExitStack() as stack:
        scaling = Scaling(bus, Workers(config, stack), LOADS[quick])
        sides = {str(size): partial(scaling.measured, size) for size in SIZES}
        figures = await interleaved(sides, rounds=ROUNDS[quick])
    one, most = figures[str(SIZES[0])], figures[str(SIZES[-1])]
    linear = one.median * SIZES[-1] / SIZES[0]
    return Result(
        name="scaling",
        ours=most.median,
        rival=linear,
        unit="episodes/s",
        ratio=most.median / linear,
        detail={
            "spread": {size: series.spread() for size, series in figures.items()},
            "of_linear": {size: series.median / (one.median * int(size)) for size, series in figures.items()},
            "window_s": {str(size): seconds for size, seconds in scaling.windows_s.items()},
            "waits": {"seed": SEED, "sigma": SIGMA, "median_s": MEDIAN_S, "longest_s": LONGEST_S},
        },
    )
