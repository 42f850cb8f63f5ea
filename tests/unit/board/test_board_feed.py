"""Records of `events` on their way to a board, and a board that is rebuilt from the end of the log."""

from __future__ import annotations

import pytest

from infra.board import feed as feeding
from infra.board.board import Board
from infra.board.feed import Feed, rebuild
from infra.bus import TopicPartition
from infra.clock import VirtualClock
from infra.memory import MemoryBus
from infra.wire import Publisher
from schemas.telemetry import EventKind, StageEvents
from schemas.topics import EVENTS, TABLE
from tests.logs import read_all

NOW_MS = 1_700_000_000_000
STARTED, FINISHED = EventKind.STARTED, EventKind.FINISHED


@pytest.fixture
async def bus():
    bus = MemoryBus(VirtualClock(NOW_MS))
    await bus.create_topics(TABLE)
    return bus


async def say(bus, *events, partition=0):
    message = StageEvents(worker="run-1", events=events)
    await Publisher(bus, bus.clock, "run-1").publish(EVENTS, message, partition=partition)


async def rebuilt(bus):
    feed = Feed(Board(), bus, bus.clock)
    await rebuild(feed, bus, bus.clock)
    return feed


def counts(feed):
    return {view.stage: view.counts["1h"] for view in feed.view().stages if view.counts["1h"]}


async def test_what_lies_in_the_log_is_on_the_board(bus, event):
    """Of every partition, by worker."""
    await say(bus, event(STARTED, -60))
    await say(bus, event(STARTED, -50, sample=1), event(FINISHED, -40, sample=1), partition=1)
    found = (await rebuilt(bus)).view()

    assert {"started": 2, "finished": 1} == found.stages[1].counts["1h"]
    assert ("run-1", 60.0) == (found.stages[1].oldest.worker, found.stages[1].oldest.age_s)


async def test_a_record_is_taken_once_however_often_it_comes(bus, event):
    """What the log is read from twice, by whoever, is told apart by its offset."""
    await say(bus, event(FINISHED, -3))
    feed = await rebuilt(bus)
    await say(bus, event(FINISHED, -2, sample=1))
    for record in [*await read_all(bus, EVENTS), *await read_all(bus, EVENTS)]:
        await feed.take(record)

    assert {"run": {"finished": 2}} == counts(feed)


async def test_what_cannot_be_read_is_counted_and_the_rest_goes_on(bus, event):
    """Neither garbage nor a record without a value stops a board."""
    await bus.publish(EVENTS.name, b"\xc1", partition=0)
    await bus.publish(EVENTS.name, None, key=b"k", partition=0)
    await say(bus, event(FINISHED, -1))
    feed = await rebuilt(bus)

    assert ({"run": {"finished": 1}}, 2) == (counts(feed), feed.view().unreadable)


async def test_only_the_end_of_a_long_log_is_read(bus, event, monkeypatch):
    """A start takes seconds, however old the topic is."""
    monkeypatch.setattr(feeding, "TAIL_RECORDS", 3)
    for sample in range(10):
        await say(bus, event(FINISHED, -9, sample=sample))
    feed = await rebuilt(bus)

    assert ({"run": {"finished": 3}}, 10) == (counts(feed), feed.position(0))


async def test_a_partition_whose_beginning_was_removed_is_read_from_there(bus, event):
    """Retention is no loss here."""
    for sample in range(4):
        await say(bus, event(FINISHED, -9, sample=sample))
    bus.log.trim(TopicPartition(EVENTS.name, 0), 2)

    assert {"run": {"finished": 2}} == counts(await rebuilt(bus))


async def test_an_empty_log_is_an_empty_board(bus):
    """Before anything ran."""
    view = (await rebuilt(bus)).view()

    assert ({}, [0, 0, 0]) == (view.states, [stage.in_flight for stage in view.stages])


async def test_a_sample_is_asked_for_by_text_from_outside(bus, event):
    """What is no number is no sample."""
    await say(bus, event(STARTED, -3))
    feed = await rebuilt(bus)

    assert feed.sample("r", "g", "0").state == "working"
    assert [None, None, None, None] == [feed.sample("r", "g", text) for text in ("1", "-1", "x", "1" * 5_000)]
