"""One timer for the limits of many blocks."""

from __future__ import annotations

import asyncio

import pytest

from infra.shared_timer import SharedTimer
from tests.logs import wait_until

LONG_S = 3600.0
"""No test lasts so long."""


async def forever():
    await asyncio.Event().wait()


async def test_a_block_that_takes_longer_ends_with_a_timeout():
    """What runs in it is cancelled, and the task goes on."""
    timer = SharedTimer()

    with pytest.raises(TimeoutError), timer.limit(0.01) as limit:
        await forever()

    assert limit.expired
    assert asyncio.current_task().cancelling() == 0


async def test_a_block_that_ends_in_time_ends_as_it_would():
    """Its own errors pass, a timeout of its own among them, and are told apart."""
    timer = SharedTimer()
    with timer.limit(LONG_S) as limit:
        await asyncio.sleep(0)
    assert not limit.expired

    with pytest.raises(TimeoutError, match="mine"), timer.limit(LONG_S) as limit:
        raise TimeoutError("mine")
    assert not limit.expired


async def test_a_cancellation_from_outside_passes():
    """A stop is no timeout, whatever the limit was."""
    timer = SharedTimer()

    async def limited():
        with timer.limit(LONG_S):
            await forever()

    task = asyncio.create_task(limited())
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_in_the_moment_of_the_timeout_keeps_its_say():
    """Both came: the task ends as cancelled."""
    timer = SharedTimer()

    async def limited():
        with timer.limit(LONG_S) as limit:
            limit.fire()
            asyncio.current_task().cancel()
            await forever()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(limited())


async def test_the_inner_of_two_limits_ends_the_inner_block_alone():
    """The outer one has time left."""
    timer, after = SharedTimer(), False

    with timer.limit(LONG_S) as outer:
        with pytest.raises(TimeoutError), timer.limit(0.01):
            await forever()
        after = True

    assert after
    assert not outer.expired


async def test_each_block_has_its_own_time():
    """Whichever was entered first: a short limit does not wait for a long one, nor a long one end with a short one."""
    timer, ended = SharedTimer(), []

    async def limited(name, seconds):
        with pytest.raises(TimeoutError), timer.limit(seconds):
            await forever()
        ended.append(name)

    tasks = [asyncio.create_task(limited(*one)) for one in {"long": LONG_S, "soon": 0.02, "later": 0.25}.items()]
    await wait_until(lambda: ended, ["soon", "later"])
    tasks[0].cancel()

    assert not tasks[0].done()


async def test_blocks_without_number_ask_the_loop_for_one_timer():
    """That is what it is for."""
    timer, loop = SharedTimer(), asyncio.get_running_loop()
    before = len(loop._scheduled)

    for _ in range(1000):
        with timer.limit(LONG_S):
            pass

    assert len(loop._scheduled) == before + 1


async def test_time_that_stands_still_does_not_count():
    """A limit lasts as long as time does; once it goes on, what is left is left."""
    loop, stood_s = asyncio.get_running_loop(), None
    began, looks = loop.time(), 0

    def still_s():
        nonlocal looks
        looks += 1
        return loop.time() - began if stood_s is None else stood_s

    timer = SharedTimer(still_s)

    async def limited():
        with timer.limit(0.01) as limit:
            try:
                await forever()
            finally:
                assert limit.expired

    task = asyncio.create_task(limited())
    await wait_until(lambda: looks, 3)
    assert not task.done()
    stood_s = loop.time() - began

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 30)
