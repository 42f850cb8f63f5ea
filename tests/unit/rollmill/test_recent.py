"""What the stages did lately, from their events."""

from __future__ import annotations

import pytest

from infra.clock import VirtualClock
from infra.memory import MemoryBus
from infra.wire import Publisher
from rollmill.recent import WINDOW_S, RecentWork, recent_work
from schemas.telemetry import EventKind, StageEvent, StageEvents
from schemas.topics import EVENTS, TABLE

NOW_MS = 1_700_000_000_000


def event(kind, at_s, *, stage="run", sample=0, attempt=0):
    at_ms = NOW_MS + int(at_s * 1000)
    return StageEvent(run="r", group="g", sample=sample, attempt=attempt, stage=stage, kind=kind, at_ms=at_ms)


@pytest.fixture
async def bus():
    bus = MemoryBus(VirtualClock(NOW_MS))
    await bus.create_topics(TABLE)
    return bus


async def say(bus, *events, partition=0):
    message = StageEvents(worker="run-1", events=events)
    await Publisher(bus, bus.clock, "run-1").publish(EVENTS, message, partition=partition)


async def test_ends_are_counted_by_stage_and_the_rest_is_in_flight(bus):
    """Any end but a finished one counts as failed."""
    await say(
        bus,
        event(EventKind.STARTED, -9, stage="init"),
        event(EventKind.FINISHED, -8, stage="init"),
        event(EventKind.STARTED, -7),
        event(EventKind.RETRIED, -6),
        event(EventKind.STARTED, -5, attempt=1),
    )
    await say(bus, event(EventKind.STARTED, -60, sample=1), event(EventKind.EXPIRED, -1, sample=2), partition=1)
    work = await recent_work(bus, bus.clock)

    assert ({"init": 1}, {"run": 2}) == (dict(work.finished), dict(work.failed))
    assert {("r", "g", 0), ("r", "g", 1)} == set(work.open["run"])
    assert (None, "r/g/1 for 60 s") == (work.oldest("init", NOW_MS), work.oldest("run", NOW_MS))


async def test_a_sample_that_was_started_again_is_in_flight_once_from_its_last_start(bus):
    """A worker that was killed leaves it open until another one starts it."""
    await say(bus, event(EventKind.STARTED, -50), event(EventKind.STARTED, -10))
    work = await recent_work(bus, bus.clock)

    assert work.oldest("run", NOW_MS) == "r/g/0 for 10 s"


async def test_events_before_the_window_are_left_out(bus):
    """Their samples are not in flight for ever."""
    await say(bus, event(EventKind.STARTED, -WINDOW_S - 1), event(EventKind.FINISHED, -WINDOW_S + 1, sample=1))
    work = await recent_work(bus, bus.clock)

    assert ({"run": 1}, {}) == (dict(work.finished), work.open["run"])


async def test_partitions_are_read_in_the_order_of_time(bus):
    """An end in one partition follows a start in another."""
    await say(bus, event(EventKind.FINISHED, -1), partition=0)
    await say(bus, event(EventKind.STARTED, -2), partition=1)
    work = await recent_work(bus, bus.clock)

    assert ({"run": 1}, {}) == (dict(work.finished), work.open["run"])


async def test_unreadable_events_are_skipped(bus):
    """Status shows what it can."""
    await bus.publish(EVENTS.name, b"\xc1", partition=0)
    await say(bus, event(EventKind.FINISHED, -1))

    assert (await recent_work(bus, bus.clock)).finished["run"] == 1


async def test_an_empty_topic_is_no_work(bus):
    """Before anything ran."""
    assert await recent_work(bus, bus.clock) == RecentWork(WINDOW_S)
