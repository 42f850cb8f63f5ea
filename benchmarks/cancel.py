"""Cancel a run of 100 running episodes on a real Kafka: how long until every environment is closed.

All processes are the product's own, started as `rollmill up` starts them: INIT, two RUN workers, EVAL, the reaper and
the environment host. The engine holds every generation (`engine.py`), so each episode is in mid-turn when the cancel
comes. An environment counts as closed when the host's own count of what it holds says so; the clock starts when the
control record is acknowledged. There is no rival: the bound is a second.

A round counts only if every sample has the outcome `cancelled` and the engine saw every generation being aborted.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.engine import HoldingEngine, holding_engine, write_model
from benchmarks.kafka import local_kafka, log_with_topics
from benchmarks.plan_services import plan_services
from benchmarks.result import Result
from benchmarks.work import collect, ends, make_tasks, messages, publish
from infra.bus import Bus
from infra.clock import SystemClock
from infra.config import BusConfig, Config
from infra.envhost.client import HttpEnvHost
from infra.errors import WaitTimeout
from infra.wire import Publisher
from rollmill.services import LocalPlan, make_plan
from schemas.control import Cancel
from schemas.outcome import Cancelled
from schemas.topics import CONTROL, TRAJECTORIES

EPISODES = 100
"""Running at once; two RUN workers have 64 slots each."""

ROUNDS = {True: 2, False: 10}
"""Quick or not -> rounds."""

LOOK_EVERY_S = 0.005
"""The host is asked how many environments it holds this often, seconds: the resolution of the figure."""

LIMIT_S = 60.0
"""Longest wait for a round's episodes to run, and for their end, seconds."""

UNUSED = {"sink", "board"}
"""Services that only look on, and need packages that not every machine has."""

BOUND_S = 1.0
"""What the figure must not exceed, seconds."""


@dataclass
class Machine:
    """Everything around one measurement."""

    bus: Bus
    engine: HoldingEngine
    host: HttpEnvHost
    closed_s: list[float] = field(default_factory=list)
    aborted_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)

    async def round(self, number: int) -> float:
        """Cancel one run of running episodes and return when its last environment was closed, in seconds."""
        run, aborted = f"cancelled-{number}", self.engine.aborted
        tasks = make_tasks(run, [{"size": 5, "index": index} for index in range(EPISODES)], family="keydoor")
        start = await ends(self.bus, TRAJECTORIES)
        await publish(self.bus, tasks)
        await self._until("episodes run", self._running)
        held: list[tuple[float, int]] = []
        generations: list[tuple[float, int]] = []
        looking = asyncio.create_task(self._look(held, generations))
        publisher = Publisher(self.bus, SystemClock(), "benchmarks")
        await publisher.publish(CONTROL, Cancel(target=run, cause="benchmark"))
        acknowledged, wall_ms = time.monotonic(), SystemClock().now_ms()
        records = await collect(self.bus, TRAJECTORIES, start, tasks, limit_s=LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            await looking
        for outcome in (await messages(TRAJECTORIES, records)).values():
            assert isinstance(outcome.outcome, Cancelled), f"{outcome.task.id} ended as {outcome.outcome}"
        assert self.engine.aborted - aborted == EPISODES, f"{self.engine.aborted - aborted} generations were aborted"
        closed = drops(held, acknowledged)
        self.closed_s += closed
        self.aborted_s += drops(generations, acknowledged)
        self.ended_s += [max(0.0, (record.timestamp_ms - wall_ms) / 1000) for record in records.values()]
        return max(closed)

    async def _running(self) -> int:
        return min(self.engine.held, (await self.host.counts()).leases["claimed"])

    async def _look(self, held: list[tuple[float, int]], generations: list[tuple[float, int]]) -> None:
        """Note how many environments and generations there are, until there are none."""
        while not held or held[-1][1] or self.engine.held:
            count = (await self.host.counts()).environments
            held.append((time.monotonic(), count))
            generations.append((time.monotonic(), self.engine.held))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _until(self, what: str, count: Callable[[], Awaitable[int]]) -> None:
        until = time.monotonic() + LIMIT_S
        while (found := await count()) < EPISODES:
            if time.monotonic() > until:
                raise WaitTimeout(f"waited {LIMIT_S:g} s until {EPISODES} {what}; {found} do")
            await asyncio.sleep(LOOK_EVERY_S)


def drops(counts: Sequence[tuple[float, int]], since: float) -> list[float]:
    """Return when each of the things that are counted was gone, in seconds since a moment, in order.

    Args:
        counts: (time, how many there were), in order; the last count is 0.
        since: the moment; what was gone before it counts as gone at it.
    """
    times: list[float] = []
    for (_, before), (at, after) in itertools.pairwise(counts):
        times += [max(0.0, at - since)] * (before - after)
    return times


def measure(*, quick: bool) -> Result:
    """Measure cancels."""
    with local_kafka("cancel.") as config:
        return asyncio.run(_measure(config, ROUNDS[quick]))


async def _measure(config: BusConfig, rounds: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="rollmill-benchmark-") as folder:
        async with log_with_topics(config) as bus, holding_engine() as engine:
            plan = make_plan(
                Path(folder) / "data",
                base=Config(bus=config),
                model=write_model(Path(folder) / "model"),
                bootstrap=config.bootstrap,
                policy_url=engine.url,
                clickhouse_url="http://127.0.0.1:9",
            )
            async with plan_services(plan, without=UNUSED), host_of(plan) as host:
                machine = Machine(bus, engine, host)
                last = [await machine.round(number) for number in range(rounds)]
    p99_s = percentile(machine.closed_s, 99)
    return Result(
        name="cancel",
        ours=p99_s,
        rival=BOUND_S,
        unit="s from the acknowledged cancel to an environment closed (p99)",
        ratio=None,
        detail={
            "p99_s": p99_s,
            "p50_s": percentile(machine.closed_s, 50),
            "max_s": max(machine.closed_s),
            "rounds_last_s": last,
            "episodes": EPISODES,
            "environments": len(machine.closed_s),
            "resolution_s": LOOK_EVERY_S,
            "generation_aborted_p99_s": percentile(machine.aborted_s, 99),
            "outcome_p99_s": percentile(machine.ended_s, 99),
        },
    )


@asynccontextmanager
async def host_of(plan: LocalPlan) -> AsyncIterator[HttpEnvHost]:
    """Give a client of the plan's environment host."""
    host = HttpEnvHost(plan.config.envhost.address)
    try:
        yield host
    finally:
        await host.disconnect()


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile: the smallest value that this share of the values does not exceed."""
    return float(np.percentile(values, percent, method="inverted_cdf"))
