"""A reader when its client fails: a twin of the client, no broker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from aiokafka.errors import KafkaConnectionError

from infra.bus import TopicPartition
from infra.errors import BusError
from infra.kafka_consumer import PartitionReader
from infra.kafka_link import KafkaLimits, KafkaLink

PART = TopicPartition("tasks", 0)
FIELDS = {"topic": "tasks", "partition": 0, "timestamp": 7, "key": None, "value": b"v", "headers": ()}


class Client:
    """Hands out three records; may not know where it is."""

    def __init__(self):
        self.at, self.knows = 0, True

    async def getmany(self, *, timeout_ms, max_records):
        found = [SimpleNamespace(offset=offset, **FIELDS) for offset in range(self.at, 3)]
        self.at = 3
        return {PART: found}

    async def position(self, partition):
        if not self.knows:
            raise KafkaConnectionError("no connection")
        return self.at

    def seek(self, partition, offset):
        self.at = offset


async def test_a_reader_that_cannot_tell_where_it_is_says_so_as_the_log_being_away_and_loses_nothing():
    """What it had fetched by then comes with the next poll."""
    reader = PartitionReader(KafkaLink("h:1", prefix="", client_id="test", limits=KafkaLimits()), {PART: 0})
    reader._client = client = Client()
    client.knows = False
    with pytest.raises(BusError, match="reading at h:1"):
        await reader.poll(10, 0.0)
    before = reader.position(PART)
    client.knows = True
    found = await reader.poll(10, 0.0)

    assert (0, [0, 1, 2], 3) == (before, [record.offset for record in found], reader.position(PART))
