"""Work beside a block: neither goes on without the other."""

from __future__ import annotations

import asyncio

import pytest

from infra.errors import BusError
from infra.service import alongside


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
