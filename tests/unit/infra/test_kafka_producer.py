"""Errors of a producer cost the producer, not the record: a twin of the client's producer, no broker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from aiokafka.errors import KafkaTimeoutError, TopicAuthorizationFailedError

from infra.clock import settle
from infra.errors import BusError
from infra.kafka import _SEQUENCE_ERRORS, KafkaBus


class Producer:
    """Acknowledges a record, or fails it once."""

    def __init__(self, error=None):
        self.error, self.sent, self.stopped = error, [], False

    async def send(self, topic, **record):
        self.sent.append(record["value"])
        acknowledged = asyncio.get_running_loop().create_future()
        if self.error is not None:
            acknowledged.set_exception(self.error)
        else:
            acknowledged.set_result(SimpleNamespace(partition=record["partition"], offset=7))
        return acknowledged

    async def stop(self):
        self.stopped = True


class Bus(KafkaBus):
    """A bus that is given its producers."""

    def __init__(self, *producers):
        super().__init__("nobody:1")
        self.producers, self.made = list(producers), []
        self._started = True
        self._link._partitions["control"] = 1

    async def _make_producer(self):
        self.made.append(self.producers.pop(0))
        return self.made[-1]


@pytest.mark.parametrize("error", _SEQUENCE_ERRORS)
async def test_a_record_that_meets_the_end_of_its_producer_is_published_by_a_new_one(error):
    """A quiet topic (UnknownProducerId), a lost batch (OutOfOrderSequence): no restart, and no error for the caller."""
    bus = Bus(Producer(error()), Producer())
    position = await bus.publish("control", b"v", key=b"k")
    await bus.close()

    assert (0, 7) == (position.partition, position.offset)
    assert [[b"v"], [b"v"]] == [producer.sent for producer in bus.made]
    assert all(producer.stopped for producer in bus.made)


async def test_a_producer_that_fails_again_is_an_error_and_not_a_loop():
    """The caller learns it; the next record has a producer of its own."""
    error = _SEQUENCE_ERRORS[0]
    bus = Bus(Producer(error()), Producer(error()), Producer())
    with pytest.raises(BusError, match="control"):
        await bus.publish("control", b"v", key=b"k")
    await bus.publish("control", b"w", key=b"k")
    await bus.close()

    assert [[b"v"], [b"v"], [b"w"]] == [producer.sent for producer in bus.made]


async def test_a_producer_that_is_just_being_made_when_the_bus_is_closed_is_stopped_too():
    """Nobody else would: its task and its connections would outlive the bus."""
    made = asyncio.Event()

    class Slow(Bus):
        async def _make_producer(self):
            if self.made:
                await made.wait()
            return await super()._make_producer()

    bus = Slow(Producer(KafkaTimeoutError()), Producer(), Producer())
    publishing = [asyncio.create_task(bus.publish("control", value, key=b"k")) for value in (b"v", b"w")]
    await settle()
    closing = asyncio.create_task(bus.close())
    await settle()
    made.set()
    await closing
    ends = await asyncio.gather(*publishing, return_exceptions=True)

    assert all(isinstance(end, BusError) for end in ends)
    assert [True, True] == [producer.stopped for producer in bus.made]


@pytest.mark.parametrize("error", [TopicAuthorizationFailedError, KafkaTimeoutError])
async def test_what_a_new_producer_would_not_mend_is_not_sent_again(error):
    """It is the record's error; the producer is replaced all the same, since the record left a hole in its sequence."""
    bus = Bus(Producer(error()), Producer())
    with pytest.raises(BusError, match="control"):
        await bus.publish("control", b"v", key=b"k")
    await bus.close()

    assert [[b"v"], []] == [producer.sent for producer in bus.made]
