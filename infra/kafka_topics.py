"""Topics on a Kafka cluster: made from the table, and compared with it.

Existing topics are never altered: a change of partitions would move keys, one of retention could delete data. How many
copies there are is the caller's wish, or the cluster's own default: the table knows no cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.admin.new_topic import NewTopic
from aiokafka.errors import NoError, TopicAlreadyExistsError, TopicAuthorizationFailedError, for_code

from infra.errors import BusError
from infra.kafka_link import KafkaLink
from infra.topic_shape import ANY_COPIES, Durability, Shape, configs, require, shape_of
from schemas.topics import Topic

log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""Pause between two looks at topics that are being made, seconds."""

_LOOKS = 10
"""Further looks for a topic that seems to be missing."""


async def create(link: KafkaLink, topics: Iterable[Topic[Any]], durability: Durability = ANY_COPIES) -> list[str]:
    """Create the topics that are missing and return their names without the prefix, once they can be written."""
    table = list(topics)
    present = await _present(link, [topic.name for topic in table])
    missing = [topic for topic in table if topic.name not in present]
    if not missing:
        return []
    replicas = durability.replicas or await _default_replicas(link)
    wanted = [
        NewTopic(
            link.prefix + topic.name, topic.partitions, replicas, topic_configs=configs(shape_of(topic), durability)
        )
        for topic in missing
    ]
    async with link.guarded(link.limits.outage_s, "creating topics"):
        answer = await link.admin.create_topics(wanted)
        for name, code, *rest in answer.topic_errors:
            # Somebody else may create the same topics at the same moment: `check` tells whether they are the same.
            if code not in (NoError.errno, TopicAlreadyExistsError.errno):
                raise BusError(f"creating topic {name} at {link.bootstrap}: {for_code(code).__name__} {rest}")
        await _until_usable(link, missing)
    return [topic.name for topic in missing]


async def check(link: KafkaLink, topics: Iterable[Topic[Any]], durability: Durability = ANY_COPIES) -> None:
    """Raise ConfigError listing every topic that is missing or differs from the table."""
    table = list(topics)
    names = [topic.name for topic in table]
    present = await _present(link, names)
    looks = _LOOKS
    while looks and len(present) < len(names):
        # Each broker learns of a new topic by itself, and any of them may have been asked.
        await asyncio.sleep(_LOOK_S)
        present = await _present(link, names)
        looks -= 1
    settings = await link.settings(present) if present else {}
    found = {name: _shape(partitions, settings[name]) for name, partitions in present.items()}
    require(table, found, prefix=link.prefix, where=link.bootstrap, durability=durability)


def _shape(partitions: list[dict[str, Any]], settings: dict[str, str]) -> Shape:
    cleanup = settings["cleanup.policy"]
    return Shape(
        partitions=len(partitions),
        cleanup=cleanup,
        retention_ms=None if cleanup == "compact" else int(settings["retention.ms"]),
        max_bytes=int(settings["max.message.bytes"]),
        replicas=min((len(partition["replicas"]) for partition in partitions), default=0),
        min_insync=int(settings["min.insync.replicas"]),
    )


async def _present(link: KafkaLink, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return topic -> its partitions, for those that can be used. Raises BusError for one that we may not see.

    A topic that is just being made may be known without a leader, and so without partitions: it counts from then on.
    """
    found = await _describe(link, names)
    hidden = sorted(topic["topic"] for topic in found if topic["error_code"] == TopicAuthorizationFailedError.errno)
    if hidden:
        raise BusError(f"looking up topics at {link.bootstrap}: {link.denied('DESCRIBE', ', '.join(hidden))}")
    return {
        topic["topic"].removeprefix(link.prefix): topic["partitions"]
        for topic in found
        if topic["error_code"] == NoError.errno and topic["partitions"]
    }


async def _describe(link: KafkaLink, names: Sequence[str]) -> list[dict[str, Any]]:
    outer = [link.prefix + name for name in names]
    async with link.guarded(link.limits.outage_s, "looking up topics"):
        found: list[dict[str, Any]] = await link.patiently(lambda: link.admin.describe_topics(outer))
    return found


async def _default_replicas(link: KafkaLink) -> int:
    setting = "default.replication.factor"
    async with link.guarded(link.limits.request_s, f"reading {setting}"):
        cluster = await link.admin.describe_cluster()
        node = str(cluster["brokers"][0]["node_id"])
        (answer,) = await link.admin.describe_configs(
            [ConfigResource(ConfigResourceType.BROKER, node, configs={setting: None})]
        )
    entries = {entry[0]: entry[1] for resource in answer.resources for entry in resource[4]}
    return int(entries[setting])


async def _until_usable(link: KafkaLink, topics: Sequence[Topic[Any]]) -> None:
    """Wait until every partition has a leader; the caller sets the limit."""
    names = [topic.name for topic in topics]
    while True:
        described = await _describe(link, names)
        if all(topic["partitions"] for topic in described) and all(
            part["leader"] >= 0 for topic in described for part in topic["partitions"]
        ):
            return
        await asyncio.sleep(_LOOK_S)
