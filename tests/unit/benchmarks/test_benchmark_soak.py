import asyncio
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated import FAMILY, Simulated
from benchmarks.soak import BUDGETS, OPEN, PER, START_S, dated, payloads, resident_bytes, slope, soak, theil_sen
from benchmarks.work import make_tasks
from infra.clock import SystemClock
from infra.memory import MemoryBus
from infra.stage import Member
from schemas.topics import TABLE
from stages.wiring import eval_stage, init_stage, run_stage


@given(st.floats(-5, 5), st.floats(-100, 100), st.integers(10, 40))
def test_the_slope_of_a_line_is_found(slope_, at, points):
    """Exactly, but for the precision of floats."""
    x = np.arange(points, dtype=float)

    assert theil_sen(x, slope_ * x + at) == pytest.approx(slope_, abs=1e-9)


def test_a_quarter_of_outliers_does_not_bend_the_line():
    """Memory jumps when a buffer grows, and falls when it is given back."""
    x = np.arange(40, dtype=float)
    y = 2.0 * x
    y[::5] += 1000.0

    assert theil_sen(x, y) == pytest.approx(2.0, abs=0.5)


def test_growth_is_a_share_of_what_is_held_after_the_warm_up():
    """What is filled once in the first tenth is no growth; what grows with the work is."""
    done = list(range(100, 10_100, 100))
    filled = [50_000_000 + min(at, 1_000) * 1_000 for at in done]
    leaking = [50_000_000 + at * 100 for at in done]

    assert slope(done, filled) == 0.0
    assert slope(done, leaking) == pytest.approx(100 * PER / 50_555_000, rel=0.01)


def test_tasks_have_their_time_from_when_they_are_published():
    """Else the last of many would be too late before they were begun."""
    (task,) = make_tasks("r", payloads(1), family=FAMILY)

    (fresh,) = dated([task])

    assert 0 < fresh.start_by_ms - SystemClock().now_ms() <= START_S * 1000
    assert (fresh.group, fresh.budgets.total_s) == (task.group, BUDGETS.total_s)


def test_the_memory_of_a_process_is_what_the_system_says():
    """An interpreter with its libraries holds some megabytes."""
    assert 5e6 < resident_bytes(os.getpid()) < 1e11


class Notes:
    """Notes how much was done, in place of memory."""

    def __init__(self):
        self.done = []

    def read(self, done):
        """Note it."""
        self.done.append(done)


async def test_all_tasks_end_and_memory_is_read_on_the_way():
    """More of them than may be open at once, so they are fed as others end."""
    bus, clock = MemoryBus(), SystemClock()
    await bus.create_topics(TABLE)
    simulated = Simulated(clock, "w")
    members = [
        Member(init_stage(simulated.init), bus, clock, worker="init", first=True),
        Member(run_stage(simulated.run), bus, clock, worker="run"),
        Member(eval_stage(simulated.eval), bus, clock, worker="eval"),
    ]
    running = [asyncio.create_task(member.run()) for member in members]
    tasks, notes = make_tasks("r", payloads(OPEN * 4), family=FAMILY), Notes()

    await asyncio.wait_for(soak(bus, tasks, notes), 60)
    for member in members:
        member.stop()
    await asyncio.gather(*running)

    assert notes.done == list(range(2, OPEN * 4 + 1, 2))
