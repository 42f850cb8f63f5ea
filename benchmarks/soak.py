"""Small tasks through all stages, for long: how much each service grows.

INIT, two RUN workers and EVAL with simulated work, the reaper and the live board, as `rollmill up` starts them, on a
real Kafka with the product's defaults. Tasks are fed as a feeder with credit does it: so many are open at once, no
more, and each has seconds to end. Now and then the resident memory of every service is read; a line is fitted
robustly (Theil-Sen, the median of the slopes of all pairs) to memory over tasks done, after the first tenth, in which
caches fill. `rss_slope` is that of the worst service: its growth per 100,000 tasks as a share of its memory.

With `--quick` without the reaper and the board: the one remembers a sample until its deadline, the other 50,000 of
them, and so few tasks end before either is full. There is no rival. Kafka itself is not looked at: its heap is bounded
by its own settings.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.kafka import local_kafka, log_with_topics
from benchmarks.plan_services import plan_services, simulated
from benchmarks.result import Result
from benchmarks.simulated import FAMILY
from benchmarks.work import ends, follow, make_tasks, publish, subject, subject_of
from infra.bus import Bus
from infra.clock import SystemClock
from infra.config import BusConfig, Config
from infra.errors import WaitTimeout
from rollmill.services import make_plan
from rollmill.supervisor import Supervisor
from schemas.messages import Budgets, Task
from schemas.topics import TRAJECTORIES

TASKS_IN_ALL = {True: 8_000, False: 200_000}
"""Quick or not -> tasks."""

BOUND = {True: 0.10, False: 0.01}
"""Quick or not -> what the figure must not exceed."""

OPEN = 128
"""Tasks under way at once: as many as two RUN workers have slots."""

FED_AT_ONCE = 16
"""New tasks are published once so many have ended."""

SAMPLES = 200
"""How often memory is read."""

OUTLINE = 21
"""So many readings of each service are told."""

TOKENS = 32
"""Tokens of a task's transcript."""

PER = 100_000
"""Growth is given per so many tasks."""

WARM_UP = 0.1
"""Share of the tasks before the fit begins."""

SILENCE_S = 60.0
"""Longest wait for the next outcome, seconds."""

UNUSED = {True: {"sink", "envhost", "reaper", "board"}, False: {"sink", "envhost"}}
"""Quick or not -> services left out: nothing asks ClickHouse, no environment is made; for the others see above."""

START_S = 5.0
"""A task is not started later than this after it was published, seconds; many times what it waits."""

BUDGETS = Budgets(init_s=1.0, run_s=1.0, eval_s=1.0)
"""What a task may spend in each stage; hundreds of times what it needs. The reaper remembers a sample for all of this
and its own grace: it should not take most of the tasks until as many are forgotten as come."""

NOWHERE = "http://127.0.0.1:9"
"""Address of what is not there and not needed."""


@dataclass
class Memory:
    """The resident memory of every service over the tasks done."""

    supervisor: Supervisor
    done: list[int] = field(default_factory=list)
    rss: dict[str, list[int]] = field(default_factory=dict)

    def read(self, done: int) -> None:
        """Note how much each service holds now."""
        self.done.append(done)
        for one in self.supervisor.state().instances:
            if one.service != "topics":  # it has ended
                self.rss.setdefault(f"{one.service}[{one.instance}]", []).append(resident_bytes(one.pid))


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def soak(bus: Bus, tasks: Sequence[Task], memory: Memory) -> None:
    """Bring all tasks to their end, OPEN of them at once at most.

    Raises:
        WaitTimeout: the next outcome did not come.
    """
    open_, every = {subject(task) for task in tasks}, max(1, len(tasks) // SAMPLES)
    start = await ends(bus, TRAJECTORIES)
    await publish(bus, dated(tasks[:OPEN]))
    published, done = OPEN, 0
    async with aclosing(follow(bus, start)) as records:
        while open_:
            try:
                async with asyncio.timeout(SILENCE_S):
                    record = await anext(records)
            except TimeoutError as error:
                raise WaitTimeout(f"no outcome came for {SILENCE_S:g} s; {len(open_)} tasks have none") from error
            if subject_of(record) not in open_:
                continue  # a second outcome of a sample
            open_.remove(subject_of(record))
            done += 1
            if done % every == 0:
                memory.read(done)
            if done % FED_AT_ONCE == 0:
                free = OPEN - (published - done)
                await publish(bus, dated(tasks[published : published + free]))
                published = min(published + free, len(tasks))


def dated(tasks: Sequence[Task]) -> list[Task]:
    """Return tasks with the time that they have from now on."""
    start_by_ms = SystemClock().now_ms() + int(START_S * 1000)
    return [msgspec.structs.replace(task, start_by_ms=start_by_ms, budgets=BUDGETS) for task in tasks]


def slope(done: Sequence[int], rss: Sequence[int]) -> float:
    """Return the growth per PER tasks after the warm-up, as a share of what is held then (its median)."""
    x, y = np.array(done, dtype=float), np.array(rss, dtype=float)
    kept = x >= WARM_UP * x[-1]
    return theil_sen(x[kept], y[kept]) * PER / float(np.median(y[kept]))


def outline(rss: Sequence[int]) -> list[float]:
    """Return the first, the last and up to OUTLINE - 2 evenly spaced readings between them, megabytes."""
    picked = np.linspace(0, len(rss) - 1, min(OUTLINE, len(rss))).astype(int)
    return [round(rss[at] / 1e6, 2) for at in picked]


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """Return the median of the slopes between all pairs of points: outliers do not bend it.

    Args:
        x: (n,), strictly increasing.
        y: (n,).
    """
    first, second = np.triu_indices(len(x), k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def measure(*, quick: bool) -> Result:
    """Measure memory."""
    with local_kafka("soak.") as config:
        return asyncio.run(_measure(config, quick=quick))


async def _measure(config: BusConfig, *, quick: bool) -> Result:
    tasks = make_tasks("soak", payloads(TASKS_IN_ALL[quick]), family=FAMILY)
    with tempfile.TemporaryDirectory(prefix="rollmill-benchmark-") as folder:
        plan = make_plan(
            Path(folder) / "data",
            base=Config(bus=config),
            bootstrap=config.bootstrap,
            policy_url=NOWHERE,
            clickhouse_url=NOWHERE,
        )
        async with (
            log_with_topics(config) as bus,
            plan_services(plan, without=UNUSED[quick], argv=simulated) as supervisor,
        ):
            memory = Memory(supervisor)
            began = time.monotonic()
            await soak(bus, tasks, memory)
            took_s = time.monotonic() - began
    slopes = {name: slope(memory.done, rss) for name, rss in memory.rss.items()}
    worst = max(slopes, key=lambda name: slopes[name])
    return Result(
        name="soak",
        ours=slopes[worst],
        rival=BOUND[quick],
        unit=f"growth of a service per {PER} tasks, as a share of its memory",
        ratio=None,
        detail={
            "rss_slope": slopes[worst],
            "worst": worst,
            "slopes": slopes,
            "rss_mb": {name: outline(rss) for name, rss in memory.rss.items()},
            "tasks": len(tasks),
            "tasks_per_s": len(tasks) / took_s,
        },
    )


def payloads(jobs: int) -> list[dict[str, float]]:
    """Return the payloads of tasks that do nothing."""
    return [{"init_s": 0.0, "run_s": 0.0, "eval_s": 0.0, "tokens": TOKENS, "index": index} for index in range(jobs)]
