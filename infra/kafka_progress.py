"""Commits for groups that nobody has joined: the progress of whoever reads whole partitions by itself.

One client per group, made at its first commit and kept: a commit is then one request. The client owns its partitions
by its own word and fetches nothing; the broker refuses it while the group has members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import CommitFailedError
from aiokafka.structs import OffsetAndMetadata

from infra.bus import Committed, TopicPartition
from infra.errors import NotOwner
from infra.kafka_link import KafkaLink


class ProgressKeeper:
    """Stores the progress of any number of groups."""

    def __init__(self, link: KafkaLink) -> None:
        self._link = link
        self._clients: dict[str, AIOKafkaConsumer] = {}
        self._one_at_a_time = asyncio.Lock()

    async def commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Store a group's progress. Raises NotOwner or BusError."""
        progress = {
            self._link.outer(partition): OffsetAndMetadata(done.offset, done.metadata)
            for partition, done in offsets.items()
        }
        async with self._link.guarded(self._link.limits.outage_s, f"committing as group {group}"), self._one_at_a_time:
            client = await self._client(group)
            client.assign(list(progress))
            client.pause(*progress)
            for partition, done in progress.items():
                client.seek(partition, done.offset)  # else it would ask where to fetch from
            try:
                await client.commit(progress)
            except CommitFailedError as error:
                raise NotOwner(f"group {group} has members: only they may commit ({error})") from error

    async def close(self) -> None:
        """Disconnect."""
        async with self._link.guarded(self._link.limits.close_s, "disconnecting"):
            for client in self._clients.values():
                await client.stop()
        self._clients.clear()

    async def _client(self, group: str) -> AIOKafkaConsumer:
        if group not in self._clients:
            client = AIOKafkaConsumer(
                **self._link.options(),
                group_id=self._link.prefix + group,
                enable_auto_commit=False,
                auto_offset_reset="none",
            )
            try:
                await client.start()
            except BaseException:
                await client.stop()
                raise
            self._clients[group] = client
        return self._clients[group]
