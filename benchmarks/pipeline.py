"""The whole pipeline, INIT, RUN and EVAL, on a real Kafka with the product's defaults; a process per stage.

First row: jobs with skewed (lognormal, seeded) waits, RUN being the bottleneck. `ours` is the number of RUN's slots
that do the work of a job, on average, in the window in which RUN has a backlog (`backlog.py`); the rival is a
bottleneck that is always busy: all `max_in_flight` slots, all the time. That is a bound rather than a program: nothing
can exceed it, so it needs no run of its own.

`detail.process_per_job`: jobs that do nothing, per second, from the first submission to the last outcome in hand; ours
through Kafka and all three stages, the rival a process per job (`process_per_job.py` says what it is rebuilt from).
Both have at most 64 jobs in work in a stage, as both come. The sides run in turns, in every round.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.backlog import Span, backlog_window, busy_slots
from benchmarks.kafka import local_kafka, log_with_topics
from benchmarks.process_per_job import WORKERS, ProcessPerJobServer
from benchmarks.result import Result, versus
from benchmarks.rounds import interleaved
from benchmarks.simulated import FAMILY
from benchmarks.stage_processes import simulated_stages
from benchmarks.work import collect, ends, make_tasks, messages, publish
from infra.bus import Bus
from infra.config import Config
from schemas.topics import EPISODES, TRAJECTORIES

SEED = 20_250_301
"""Of the waits; each round adds its number."""

SIGMA = 1.0
"""Of the logarithm of a wait: the longest of 400 would be about twenty times the median."""

MEDIAN_S = {"init_s": 0.05, "run_s": 0.4, "eval_s": 0.05}
"""Median wait in each stage. RUN's is short beside a real episode's minutes, which is the harder case."""

LONGEST_S = 4.0
"""Waits are cut off here, so that a round ends."""

SKEWED_TOKENS = 1024
"""Tokens of the transcript of a job with waits."""

NO_OP_TOKENS = 32
"""Tokens of the transcript of a job that does nothing."""

LIMIT_S = 120.0
"""Longest wait for the outcomes of a round."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int
    """Rounds of each side."""
    skewed: int
    """Jobs with waits in a round."""
    ours: int
    """Jobs that do nothing, ours, in a round."""
    rival: int
    """The same, the rival's: it is slower, and both sides should take seconds."""


QUICK = Plan(rounds=3, skewed=400, ours=1200, rival=24)
FULL = Plan(rounds=5, skewed=1000, ours=6000, rival=200)


@dataclass
class Pipeline:
    """Our side."""

    bus: Bus
    slots: int
    windows: list[float] = field(default_factory=list)

    async def skewed(self, run: str, payloads: list[dict[str, Any]]) -> float:
        """Return how many of RUN's slots were busy while it had a backlog."""
        tasks = make_tasks(run, payloads, family=FAMILY)
        episodes, trajectories = await ends(self.bus, EPISODES), await ends(self.bus, TRAJECTORIES)
        await publish(self.bus, tasks)
        outcomes = await messages(
            TRAJECTORIES, await collect(self.bus, TRAJECTORIES, trajectories, tasks, limit_s=LIMIT_S)
        )
        queued = await collect(self.bus, EPISODES, episodes, tasks, limit_s=LIMIT_S)
        spans = []
        for outcome in outcomes.values():
            assert outcome.verdict is not None, f"{outcome.task.id} did not complete: {outcome.outcome}"
            began_s = outcome.verdict["began_ms"] / 1000
            spans.append(Span(began_s, began_s + outcome.task.payload["run_s"]))
        arrived = [record.timestamp_ms / 1000 for record in queued.values()]
        window = backlog_window(arrived, [span.start for span in spans], slots=self.slots)
        self.windows.append(window.length)
        return busy_slots(spans, window)

    async def no_ops(self, run: str, jobs: int) -> float:
        """Return jobs per second that do nothing."""
        tasks = make_tasks(run, no_op_payloads(jobs), family=FAMILY)
        start = await ends(self.bus, TRAJECTORIES)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(publish(self.bus, tasks))
            group.create_task(collect(self.bus, TRAJECTORIES, start, tasks, limit_s=LIMIT_S))
        return jobs / (time.monotonic() - began)


class Rival:
    """The process-per-job server and its clients."""

    def __init__(self, server: ProcessPerJobServer, clients: ThreadPoolExecutor) -> None:
        self._server = server
        self._clients = clients

    async def no_ops(self, jobs: int) -> float:
        """Return jobs per second that do nothing."""
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        results = await asyncio.gather(
            *(
                loop.run_in_executor(self._clients, self._server.process, {"instance_id": number})
                for number in range(jobs)
            )
        )
        assert all(result.get("success") for result in results), f"a job of the rival failed: {results}"
        return jobs / (time.monotonic() - began)


def measure(*, quick: bool) -> Result:
    """Measure the pipeline."""
    with local_kafka("pipeline.") as config:
        return asyncio.run(_measure(Config(bus=config), QUICK if quick else FULL))


async def _measure(config: Config, plan: Plan) -> Result:
    slots = config.run.max_in_flight
    async with log_with_topics(config.bus) as bus, simulated_stages(config.bus), process_per_job() as rival:
        ours = Pipeline(bus, slots)
        await ours.no_ops("warm-up", plan.ours // 4)
        await rival.no_ops(2)
        figures = await interleaved(
            {
                "skewed": lambda number: ours.skewed(f"skewed-{number}", waits(SEED + number, plan.skewed)),
                "ours": lambda number: ours.no_ops(f"no-op-{number}", plan.ours),
                "rival": lambda _: rival.no_ops(plan.rival),
            },
            rounds=plan.rounds,
        )
    busy = figures["skewed"].median
    return Result(
        name="pipeline",
        ours=busy,
        rival=float(slots),
        unit="busy slots of RUN",
        ratio=busy / slots,
        detail={
            "spread": figures["skewed"].spread(),
            "window_s": ours.windows,
            "waits": {"seed": SEED, "sigma": SIGMA, "median_s": MEDIAN_S, "longest_s": LONGEST_S, "jobs": plan.skewed},
            "process_per_job": {
                **versus(figures["ours"], figures["rival"], unit="jobs/s"),
                "jobs": {"ours": plan.ours, "rival": plan.rival},
            },
        },
    )


@asynccontextmanager
async def process_per_job() -> AsyncIterator[Rival]:
    """Run the rival's server, with as many clients as it has workers."""
    server = ProcessPerJobServer()
    await asyncio.to_thread(server.start)
    try:
        with ThreadPoolExecutor(WORKERS) as clients:
            yield Rival(server, clients)
    finally:
        await asyncio.to_thread(server.stop)


def waits(seed: int, jobs: int) -> list[dict[str, Any]]:
    """Return the payloads of jobs with skewed waits."""
    draw = random.Random(seed)
    return [
        {stage: min(LONGEST_S, median * draw.lognormvariate(0, SIGMA)) for stage, median in MEDIAN_S.items()}
        | {"tokens": SKEWED_TOKENS}
        for _ in range(jobs)
    ]


def no_op_payloads(jobs: int) -> list[dict[str, Any]]:
    """Return the payloads of jobs that do nothing."""
    return [dict.fromkeys(MEDIAN_S, 0.0) | {"tokens": NO_OP_TOKENS} for _ in range(jobs)]
