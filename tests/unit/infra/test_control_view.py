"""Current state: the latest record of each key, as far as it says more than what is known."""

from __future__ import annotations

import asyncio
import logging

import msgpack
import pytest

from infra.clock import VirtualClock, settle
from infra.control import CATCH_UP_S, ControlView
from infra.errors import BusError, WaitTimeout
from infra.memory import MemoryBus
from infra.wire import Publisher
from schemas.claim import HEADER
from schemas.codec import encode
from schemas.control import Breaker, Credit, Cursor, FeederStarted, PolicyVersion, RunManifest
from schemas.topics import CONTROL, TABLE

CLOCK = VirtualClock()


@pytest.fixture
async def bus():
    bus = MemoryBus(CLOCK)
    await bus.create_topics(TABLE)
    return bus


async def say(bus, *messages):
    for message in messages:
        await Publisher(bus, CLOCK, "test").publish(CONTROL, message)


def credit(epoch, groups, **changes):
    stamps = {"min_version": 0, "horizon": 1, "temperature": 1.0, **changes}
    return Credit(run="r", epoch=epoch, admit_up_to=groups, **stamps)


def version(epoch, number):
    return PolicyVersion(run="r", epoch=epoch, version=number, directory="/w", digest="d")


def breaker(open_ms, at_ms, **changes):
    fields = {"service": "policy", "address": "a", "stage": "run", "worker": "w", "open": True, "since_ms": 0}
    return Breaker(**{**fields, "open_ms": open_ms, "at_ms": at_ms, **changes})


async def view_of(bus):
    view = ControlView(bus, CLOCK)
    await view.start()
    await view.close()
    return view


@pytest.mark.parametrize(
    ("key", "records", "latest"),
    [
        ("credit/r", [credit(1, 5), credit(1, 7)], 1),
        ("credit/r", [credit(1, 5), credit(1, 3)], 0),
        ("credit/r", [credit(2, 5), credit(1, 9)], 0),
        ("credit/r", [credit(2, 5), credit(3, 2)], 1),
        ("credit/r", [credit(1, 5), credit(1, 5, closed=True)], 1),
        ("policy/r", [version(1, 4), version(1, 3)], 0),
        ("policy/r", [version(2, 4), version(1, 9)], 0),
        ("policy/r", [version(1, 4), version(2, 3)], 1),
        ("cursor/r", [Cursor(run="r", admitted=4), Cursor(run="r", admitted=2)], 0),
        ("cursor/r", [Cursor(run="r", admitted=4), Cursor(run="r", admitted=5)], 1),
        ("run/r", [RunManifest(run="r", seed=1, samples=1), RunManifest(run="r", seed=2, samples=1)], 0),
        ("feeder/r", [FeederStarted(run="r", feeder=name, source="s") for name in ("b", "a")], 1),
        ("breaker/policy/a/run/w", [breaker(5, 10), breaker(4, 9)], 0),
        ("breaker/policy/a/run/w", [breaker(5, 10), breaker(5, 9, open=False)], 0),
        ("breaker/policy/a/run/w", [breaker(5, 10), breaker(6, 9)], 1),
        ("breaker/policy/a/run/w", [breaker(5, 10), breaker(0, 11)], 1),
        ("breaker/policy/a/run/w", [breaker(5, 10), breaker(5, 12, open=False)], 1),
    ],
)
async def test_a_record_that_says_less_is_ignored(bus, key, records, latest):
    """A lower epoch or a smaller number changes nothing, wherever it lies in the log.

    Of a breaker neither number alone would do: clocks are set back, and a worker that begins again counts from zero.
    """
    await say(bus, *records)
    view = await view_of(bus)

    assert records[latest] == view.get(key, type(records[0]))


async def test_a_record_that_counts_no_longer_last_in_the_log_is_known(bus):
    """Compaction would keep the wrong one: whoever cares writes the right one again."""
    first, second = (RunManifest(run="r", seed=seed, samples=1) for seed in (1, 2))
    await say(bus, first, credit(1, 5))
    before = (await view_of(bus)).overruled("run/r")
    await say(bus, second)
    view = await view_of(bus)
    await say(bus, first)

    assert (False, True, False) == (before, view.overruled("run/r"), (await view_of(bus)).overruled("run/r"))
    assert (0, 1, -1) == (view.offset("run/r"), view.offset("credit/r"), view.offset("cursor/r"))


async def test_a_tombstone_removes_its_key_and_no_other(bus):
    """A compacted topic forgets so."""
    await say(bus, credit(1, 5), version(1, 1))
    await bus.publish(CONTROL.name, None, key=b"credit/r", partition=0)
    await bus.publish(CONTROL.name, None, key=b"never/there", partition=0)
    view = await view_of(bus)

    assert (None, version(1, 1)) == (view.get("credit/r", Credit), view.get("policy/r", PolicyVersion))


async def test_what_was_forgotten_may_be_said_anew(bus):
    """After a tombstone nothing is older."""
    await say(bus, credit(5, 9))
    await bus.publish(CONTROL.name, None, key=b"credit/r", partition=0)
    await say(bus, credit(1, 1))

    assert (await view_of(bus)).get("credit/r", Credit) == credit(1, 1)


BAD_RECORDS = {
    "garbage": (b"\xc1", b"credit/r"),
    "garbage under a key that is no text": (b"\xc1", b"\xff"),
    "garbage under a key of 900 kB": (b"\xc1", b"k" * 900_000),
    "a type as long": (msgpack.packb({"v": 1, "type": "t" * 900_000}), b"long"),
    "another key's message": (encode(credit(9, 99)), b"credit/other"),
}


@pytest.mark.parametrize(("value", "key"), BAD_RECORDS.values(), ids=BAD_RECORDS)
async def test_a_record_that_is_none_is_passed_over_and_mentioned_shortly(bus, caplog, value, key):
    """What was known stays; a command says nothing of it, a service one short line."""
    caplog.set_level("INFO")
    await say(bus, credit(1, 5))
    await bus.publish(CONTROL.name, value, key=key, partition=0)
    await say(bus, version(1, 1))
    refused = []
    view = ControlView(bus, CLOCK, refused=lambda record, reason: refused.append((record.offset, reason)))
    await view.start()
    await view.close()

    assert (credit(1, 5), version(1, 1)) == (view.get("credit/r", Credit), view.get("policy/r", PolicyVersion))
    assert [1] == [offset for offset, _ in refused]
    assert [logging.INFO] == [record.levelno for record in caplog.records]
    assert len(caplog.records[0].getMessage()) < 1_000


async def test_a_claim_check_on_control_stops_nobody(bus):
    """No store is asked: were it away, every service would wait for it."""
    await bus.publish(CONTROL.name, b"\x80", key=b"credit/r", partition=0, headers=((HEADER, b"0" * 64),))
    await say(bus, credit(1, 5))

    assert (await view_of(bus)).get("credit/r", Credit) == credit(1, 5)


async def test_a_record_that_is_none_overrules_what_counts_for_compaction(bus):
    """It would be the one that is kept: whoever cares writes the right one again."""
    await say(bus, credit(1, 5))
    await bus.publish(CONTROL.name, b"\xc1", key=b"credit/r", partition=0)

    assert (await view_of(bus)).overruled("credit/r")


async def test_records_are_asked_for_by_kind(bus):
    """A key of another kind is none; `all` is sorted by key."""
    manifests = [RunManifest(run=run, seed=1, samples=1) for run in ("b", "a")]
    await say(bus, *manifests, credit(1, 1))
    view = await view_of(bus)

    assert view.get("run/a", Credit) is None
    assert manifests[::-1] == view.all(RunManifest)


async def test_a_view_knows_what_was_there_before_it_started(bus):
    """No service works with a state that it has not read, however long the topic is."""
    await say(bus, *(credit(1, number) for number in range(1200)))

    assert (await view_of(bus)).get("credit/r", Credit) == credit(1, 1199)


async def test_a_change_wakes_whoever_waits(bus):
    """And nobody waits longer than the limit."""
    view = ControlView(bus, CLOCK)
    async with view.following():
        waiting = asyncio.create_task(view.changed(3600))
        await settle()
        asleep = not waiting.done()
        await say(bus, credit(1, 1))
        await asyncio.wait_for(waiting, 5)
        limited = asyncio.create_task(view.changed(10))
        await settle()
        await CLOCK.advance(10)
        await asyncio.wait_for(limited, 5)

        assert asleep
        assert credit(1, 1) == view.get("credit/r", Credit)


class Unreadable(MemoryBus):
    """A log whose readers break, or get nowhere."""

    error: Exception | None = None
    stuck = False

    async def read(self, start):
        reader = await super().read(start)
        poll = reader.poll

        async def broken(max_records, timeout_s):
            if self.error is not None:
                raise self.error
            if self.stuck:
                await CLOCK.sleep(timeout_s)
                return []
            return await poll(max_records, timeout_s)

        reader.poll = broken
        return reader


@pytest.fixture
async def unreadable():
    bus = Unreadable(CLOCK)
    await bus.create_topics(TABLE)
    return bus


async def test_a_reader_that_breaks_ends_the_work_that_follows_it(unreadable):
    """Whoever waits for a change would wait for ever; the error is the reader's own."""
    view, ended = ControlView(unreadable, CLOCK), asyncio.Event()

    async def work():
        async with view.following():
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    running = asyncio.create_task(work())
    await settle()
    unreadable.error = BusError("the broker is away")
    await CLOCK.advance(1)

    with pytest.raises(BusError, match="broker is away"):
        await asyncio.wait_for(running, 5)
    assert ended.is_set()


async def test_an_error_of_the_work_leaves_as_it_is(bus):
    """Following adds nothing to it."""

    async def work():
        async with ControlView(bus, CLOCK).following():
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await work()


async def test_a_topic_that_does_not_end_is_given_up(unreadable):
    """The error says how far the reader came."""
    await say(unreadable, credit(1, 1))
    unreadable.stuck = True
    starting = asyncio.create_task(ControlView(unreadable, CLOCK).start())
    await settle()
    await CLOCK.advance(CATCH_UP_S + 1)

    with pytest.raises(WaitTimeout, match="waited 30 s for the end of `control` at 1; read up to 0"):
        await asyncio.wait_for(starting, 5)


async def test_a_view_knows_whether_it_has_everything(bus):
    """What was written after its last look is not in it yet."""
    view = ControlView(bus, CLOCK)
    async with view.following():
        before = await view.caught_up()
        await say(bus, credit(1, 5))
        behind = await view.caught_up()
        await settle()
        then = await view.caught_up()

    assert (True, False, True) == (before, behind, then)
