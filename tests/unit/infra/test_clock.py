"""Time as tests see it: it stands still until somebody moves it, and wakes sleepers in order."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.clock import SystemClock, VirtualClock, settle


async def sleepers(clock: VirtualClock, *delays: float) -> tuple[list[tuple[float, float]], list[asyncio.Task[None]]]:
    """Start a sleeper per delay; each notes (its delay, the time it woke at)."""
    woken: list[tuple[float, float]] = []

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((seconds, clock.monotonic()))

    tasks = [asyncio.create_task(sleep(seconds)) for seconds in delays]
    await settle()
    return woken, tasks


async def test_time_stands_still():
    """Nothing happens by itself, however long the test takes."""
    clock = VirtualClock(now_ms=5_000)
    woken, tasks = await sleepers(clock, 0.001)
    assert (clock.now_ms(), clock.monotonic(), woken) == (5_000, 0.0, [])
    await clock.advance(1)
    await asyncio.gather(*tasks)


async def test_advancing_moves_both_clocks():
    """The wall clock and the monotonic one tell the same story."""
    clock = VirtualClock(now_ms=5_000)
    await clock.advance(1.5)
    assert (clock.now_ms(), clock.monotonic()) == (6_500, 1.5)


@given(delays=st.lists(st.floats(0.001, 10.0), max_size=6))
def test_sleepers_wake_in_the_order_of_their_deadlines(delays):
    """Each one sees the time of its own deadline, also when one jump passes all of them."""

    async def story() -> None:
        clock = VirtualClock()
        woken, tasks = await sleepers(clock, *delays)
        await clock.advance(10.0)
        await asyncio.gather(*tasks)
        assert woken == [(delay, delay) for delay in sorted(delays)]
        assert clock.monotonic() == 10.0

    asyncio.run(story())


async def test_a_sleeper_may_sleep_again_within_one_jump():
    """A loop that ticks every second ticks ten times in ten seconds."""
    clock = VirtualClock()
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await clock.sleep(1.0)
            ticks.append(clock.monotonic())

    ticking = asyncio.create_task(tick())
    await settle()
    await clock.advance(10.0)
    ticking.cancel()
    assert ticks == [float(second) for second in range(1, 11)]


async def test_a_sleeper_beyond_the_jump_sleeps_on():
    """Time stops exactly where it was told to."""
    clock = VirtualClock()
    woken, tasks = await sleepers(clock, 1.0, 3.0)
    await clock.advance(2.0)
    assert (woken, clock.monotonic()) == ([(1.0, 1.0)], 2.0)
    await clock.advance(1.0)
    assert woken == [(1.0, 1.0), (3.0, 3.0)]
    await asyncio.gather(*tasks)


async def test_a_cancelled_sleeper_disturbs_nobody():
    """What was given up is passed over."""
    clock = VirtualClock()
    woken, (first, second) = await sleepers(clock, 1.0, 2.0)
    first.cancel()
    await clock.advance(2.0)
    assert woken == [(2.0, 2.0)]
    await second


@pytest.mark.parametrize("seconds", [0.0, -1.0])
async def test_sleeping_for_no_time_gives_way_once(seconds):
    """A deadline that is past does not block, and lets others run."""
    clock = VirtualClock()
    ran: list[str] = []
    other = asyncio.create_task(asyncio.sleep(0, ran.append("other")))
    await clock.sleep(seconds)
    assert ran == ["other"]
    assert clock.monotonic() == 0.0
    await other


async def test_the_system_clock_is_the_machines():
    """Milliseconds since the epoch, seconds that never run backwards, and a sleep that takes time."""
    clock = SystemClock()
    assert abs(clock.now_ms() - time.time() * 1000) < 1_000
    before = clock.monotonic()
    await clock.sleep(0.001)
    assert clock.monotonic() > before
