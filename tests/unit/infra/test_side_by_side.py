"""Work beside a block or other work: neither goes on without the other."""

from __future__ import annotations

import asyncio

import pytest

from infra.breaker import BreakerLimits
from infra.clock import SystemClock
from infra.errors import BusError
from infra.guard import Guards
from infra.memory import MemoryBus
from infra.service import run_service
from infra.side_by_side import alongside, together
from infra.wire import Publisher

AT_ONCE = BreakerLimits(failures=1, failing_s=0.0, first_pause_s=0.0)


async def test_the_end_of_the_block_ends_the_work():
    """However the block is left."""
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async with alongside(work()):
        await asyncio.sleep(0)
    with pytest.raises(BusError, match="the block"):
        async with alongside(work()):
            await asyncio.sleep(0)
            raise BusError("the block")

    assert [True, True] == ended


async def test_the_error_of_the_work_ends_the_block_and_leaves_it():
    """As it is, in no group."""

    async def work():
        raise BusError("the work")

    with pytest.raises(BusError, match="the work"):
        async with alongside(work()):
            await asyncio.wait_for(asyncio.Event().wait(), 10)


async def test_an_error_in_a_group_of_its_own_leaves_alone_too():
    """Some work consists of several tasks; who waits for an error need not know."""

    async def work():
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    async def fails():
        raise BusError("deep inside")

    with pytest.raises(BusError, match="deep inside"):
        async with alongside(work()):
            await asyncio.wait_for(asyncio.Event().wait(), 10)


def test_a_service_whose_guards_break_ends_with_the_text_of_the_error(capsys):
    """A probe that raises what no probe may raise: one line and code 1, and no trace of groups."""

    async def probe():
        raise BusError("no such thing")

    async def main():
        clock = SystemClock()
        guards = Guards(Publisher(MemoryBus(clock), clock, "run-1"), clock, stage="run", worker="run-1", limits=AT_ONCE)
        guard = guards.guard("policy", "http://here", probe)
        async with alongside(guards.run()):
            guard.failed("connection refused")
            await asyncio.wait_for(asyncio.Event().wait(), 10)

    assert 1 == run_service(main)
    assert "error: no such thing" in capsys.readouterr().err


async def test_the_first_error_of_several_works_stops_the_others():
    """Nothing of them goes on behind the back of whoever waited."""
    going_on = []

    async def fails():
        raise BusError("the first")

    async def goes_on():
        await asyncio.sleep(0)
        going_on.append("one")
        await asyncio.wait_for(asyncio.Event().wait(), 10)

    with pytest.raises(BusError, match="the first"):
        await together([fails(), goes_on()])
    assert {asyncio.current_task()} == asyncio.all_tasks()
    await together([])
