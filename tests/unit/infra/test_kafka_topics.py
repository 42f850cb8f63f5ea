"""What a broker says of topics while it is still making them: a twin of the client's questions, no broker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from aiokafka.errors import LeaderNotAvailableError, NoError, UnknownTopicOrPartitionError

from infra import kafka_topics
from infra.errors import ConfigError
from infra.kafka_link import KafkaLimits, KafkaLink
from infra.topic_shape import configs, shape_of
from schemas.topics import TASKS

THERE = (NoError, TASKS.partitions)
LEADERLESS = (LeaderNotAvailableError, 0)
UNKNOWN = (UnknownTopicOrPartitionError, 0)


class Admin:
    """Knows one topic, as each of these answers says; the last one stays."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def describe_topics(self, names):
        error, partitions = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        found = [{"partition": number, "leader": 1, "replicas": [1]} for number in range(partitions)]
        return [{"topic": name, "error_code": error.errno, "partitions": found} for name in names]

    async def describe_configs(self, resources):
        settings = {**configs(shape_of(TASKS)), "min.insync.replicas": "1"}
        return [
            SimpleNamespace(resources=[(0, "", 2, resource.name, list(settings.items())) for resource in resources])
        ]


def link_to(*answers):
    link = KafkaLink("nobody:1", prefix="", client_id="test", limits=KafkaLimits())
    link._admin = Admin(*answers)
    return link


async def test_a_topic_that_has_no_leader_yet_is_looked_for_again():
    """It is not one of no partitions: a service that starts beside `up` must not end over it."""
    await kafka_topics.check(link_to(LEADERLESS, UNKNOWN, LEADERLESS, THERE), [TASKS])


@pytest.mark.parametrize("answer", [LEADERLESS, UNKNOWN])
async def test_a_topic_that_stays_without_partitions_is_missing(answer):
    """And nothing is said of how many it has."""
    with pytest.raises(ConfigError, match="tasks: missing") as raised:
        await kafka_topics.check(link_to(answer), [TASKS])

    assert "partitions is" not in str(raised.value)
