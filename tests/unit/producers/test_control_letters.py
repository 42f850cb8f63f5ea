"""What nobody can use of `control`: one letter each, from the reaper alone, and everything else goes on."""

from __future__ import annotations

import asyncio

import pytest

from infra.dead_letter import DeadLetter
from infra.wire import Publisher
from producers.control_letters import ControlLetters
from producers.reaper import Reaper
from schemas.control import Cancel
from schemas.topics import CONTROL, DEAD, TASKS, TRAJECTORIES
from tests.logs import make_task, read_all

LONG = b"k" * 900_000


async def letters(bus):
    return [DeadLetter(record, bus) for record in await read_all(bus, DEAD)]


async def count(bus, topic):
    return len(await read_all(bus, topic))


async def reap(bus, clock, until):
    """Let a reaper work until something is true."""
    reaper = asyncio.create_task(Reaper(bus, clock).run())
    try:
        async with asyncio.timeout(60):
            while not await until():
                assert not reaper.done(), reaper.exception()
                await clock.advance(1)
    finally:
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)


async def test_the_reaper_buries_a_bad_record_once_and_does_its_work(bus, clock):
    """Garbage of any size lies between what counts; a second life of the reaper finds the letters and adds none."""
    publisher = Publisher(bus, clock, "test")
    await publisher.publish(TASKS, make_task(run="r"))
    await bus.publish(CONTROL.name, b"\xc1", key=LONG, partition=0)
    await bus.publish(CONTROL.name, b"", key=b"\xff", partition=0)
    await publisher.publish(CONTROL, Cancel(target="r", cause="by request"))

    async def ended_and_buried():
        return await count(bus, TRAJECTORIES) >= 1 and await count(bus, DEAD) >= 2

    await reap(bus, clock, ended_and_buried)
    await publisher.publish(TASKS, make_task(run="r", group="later"))
    await reap(bus, clock, lambda: at_least(bus, TRAJECTORIES, 2))

    found = await letters(bus)
    assert [(0, "reaper", "poison"), (1, "reaper", "poison")] == [
        (letter.original.offset, letter.death.stage, letter.death.kind) for letter in found
    ]
    assert {CONTROL.name} == {letter.original.topic for letter in found}
    assert all(len(letter.death.cause) < 600 for letter in found)


async def at_least(bus, topic, number):
    return await count(bus, topic) >= number


async def test_a_bad_record_that_comes_while_the_reaper_works_is_buried_too(bus, clock):
    """It need not be there at the start."""
    await Publisher(bus, clock, "test").publish(TASKS, make_task(run="r"))
    reaper = asyncio.create_task(Reaper(bus, clock).run())
    try:
        await clock.advance(2)
        await bus.publish(CONTROL.name, b"\xc1", key=b"k", partition=0)
        async with asyncio.timeout(60):
            while not await count(bus, DEAD):
                await clock.advance(1)
    finally:
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)

    assert ["k"] == [(letter.original.key or b"").decode() for letter in await letters(bus)]


@pytest.mark.parametrize("ahead_ms", [0, 10**12])
async def test_letters_that_lie_in_dead_already_are_found_whatever_the_clock_of_the_record_said(bus, clock, ahead_ms):
    """A stamp from the future says nothing about when the letter was written."""
    await bus.publish(CONTROL.name, b"\xc1", key=b"k", partition=0)
    (record,) = await read_all(bus, CONTROL)
    record = type(record)(
        record.topic, record.partition, record.offset, record.timestamp_ms + ahead_ms, record.key, record.value
    )
    written = []
    for _ in range(3):
        life = ControlLetters(bus, clock, "reaper")
        life.take(record, "not msgpack")
        written.append(await life.write())
        await clock.advance(7200)

    assert [1, 0, 0] == written


async def test_nothing_is_read_of_dead_where_nothing_is_bad(bus, clock):
    """A reaper's start takes no longer with every letter."""

    class NoDead:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked of the log")

    assert 0 == await ControlLetters(NoDead(), clock, "reaper").write()
