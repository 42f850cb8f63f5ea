"""What a job waits for is said by whoever waits, and heard by the job alone."""

from __future__ import annotations

import asyncio

import pytest

from infra.clock import VirtualClock, settle
from infra.waiting import SAY_AFTER_S, heard_by, waiting, waits_for


@pytest.fixture
def clock():
    return VirtualClock()


def test_nobody_listens_outside_a_job():
    """Saying it costs nothing and fails nowhere."""
    waits_for("a place")


async def test_each_job_hears_its_own_waits_also_those_of_its_tasks():
    """Jobs run side by side in one process."""
    heard = {name: [] for name in "ab"}

    async def job(name):
        with heard_by(heard[name].append):
            waits_for(f"{name}1")
            await asyncio.sleep(0)
            await asyncio.gather(asyncio.create_task(deep(f"{name}2")))

    async def deep(what):
        waits_for(what)

    await asyncio.gather(job("a"), job("b"))
    waits_for("nobody's")

    assert {"a": ["a1", "a2"], "b": ["b1", "b2"]} == heard


async def test_a_long_call_says_what_it_waits_for_and_when_it_is_over(clock):
    """The other side lets it wait; what is waited for may change meanwhile."""
    heard, done = [], asyncio.Event()

    async def call():
        with heard_by(heard.append):
            async with waiting(clock, "an answer") as wait:
                await clock.sleep(1.5 * SAY_AFTER_S)
                wait.what = "another answer"
                await done.wait()

    calling = asyncio.create_task(call())
    await settle()
    await clock.advance(SAY_AFTER_S)
    assert ["an answer"] == heard
    await clock.advance(SAY_AFTER_S)
    done.set()
    await calling

    assert ["an answer", "another answer", ""] == heard


async def test_a_short_call_is_nobodys_business(clock):
    """Only that nothing is waited for any more, which whoever listens knows."""
    heard = []
    with heard_by(heard.append):
        async with waiting(clock, "an answer"):
            await settle()
    await clock.advance(10 * SAY_AFTER_S)

    assert [""] == heard


async def test_an_error_ends_the_wait_and_passes(clock):
    """What was waited for did not come."""
    heard = []
    with heard_by(heard.append), pytest.raises(ValueError, match="gone"):
        async with waiting(clock, "an answer"):
            raise ValueError("gone")

    assert [""] == heard
