import pytest

from benchmarks.recovery import back_s, repeated, starts
from benchmarks.work import ends
from infra.clock import SystemClock
from infra.memory import MemoryBus
from infra.wire import Publisher
from schemas.telemetry import EventKind, StageEvent, StageEvents
from schemas.topics import EVENTS, TABLE


def started(sample, at_ms, *, worker="w", kind=EventKind.STARTED):
    return worker, StageEvent(run="r", group="g", sample=sample, attempt=0, stage="run", kind=kind, at_ms=at_ms)


def test_a_sample_counts_as_repeated_once_however_often_it_was_started():
    """Three starts are one sample that was done more than once."""
    events = [started(0, 1), started(1, 1), started(0, 2), started(0, 3)]

    assert repeated(events) == 1


def test_work_is_back_when_the_last_of_what_was_in_flight_is_started_again():
    """Starts before the kill, and of others, say nothing."""
    events = [
        started(0, 900),
        started(1, 900),
        started(2, 950),
        started(0, 3_000),
        started(1, 4_500),
        started(2, 9_000),
    ]

    assert back_s(events, {"r/g/0", "r/g/1"}, 1_000) == pytest.approx(3.5)


def test_work_that_never_comes_back_is_an_error():
    """It must not look like a fast recovery."""
    with pytest.raises(ValueError, match="1 of 2 tasks"):
        back_s([started(0, 2_000), started(1, 900)], {"r/g/0", "r/g/1"}, 1_000)


async def test_starts_are_read_from_the_events_of_all_workers():
    """From where a round began, and nothing but starts."""
    bus = MemoryBus()
    await bus.create_topics(TABLE)
    publisher = Publisher(bus, SystemClock(), "test")
    await publisher.publish(EVENTS, StageEvents(worker="old", events=(started(9, 1)[1],)), partition=0)
    since = await ends(bus, EVENTS)
    ended = started(0, 3, kind=EventKind.FINISHED)[1]
    await publisher.publish(EVENTS, StageEvents(worker="a", events=(started(0, 2)[1], ended)), partition=0)
    await publisher.publish(EVENTS, StageEvents(worker="b", events=(started(1, 2)[1],)), partition=1)

    found = await starts(bus, since)

    assert sorted((worker, event.sample) for worker, event in found) == [("a", 0), ("b", 1)]
