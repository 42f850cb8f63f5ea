"""The connection to a Kafka cluster that everything else shares: names, limits, errors, and questions about offsets.

Names without a prefix live on our side of this file, names with it on Kafka's. Every call to the cluster goes through
`guarded`, so it has a limit and fails as a BusError that says what was tried and where. Every client is made after
`reach`, from the addresses that answer just then. No record passes through here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaError,
    KafkaTimeoutError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from infra.bus import Committed, TopicPartition
from infra.errors import BusError
from infra.kafka_reach import reach
from infra.security import PLAINTEXT, Security
from schemas.limits import FETCH_BYTES, RECORD_BYTES

log = logging.getLogger(__name__)

START_ADVICE = "start one with `rollmill up` or `rollmill broker start`, or set bus.bootstrap"
"""For who cannot connect."""

PUBLISH_ADVICE = "does a broker run, has it room on its disk, are enough copies in sync (min.insync.replicas)?"
"""For who was connected, and whose records are acknowledged no more."""

_RETRY_S = 0.1
"""Pause before a question that failed for now is asked again, seconds."""


@dataclass(frozen=True, kw_only=True)
class KafkaLimits:
    """Bounds of one client, each with its unit."""

    connect_s: float = 15.0
    """Longest wait for the first answer, seconds: a broker may be starting beside us."""
    request_s: float = 10.0
    """Longest wait for one answer of a broker that is connected, seconds."""
    outage_s: float = 30.0
    """Longest outage of the broker that publishing and questions wait out, seconds: a restart must fit in."""
    topic_s: float = 5.0
    """A topic that a broker does not know for this long does not exist, seconds."""
    join_s: float = 60.0
    """Longest wait for the first assignment in a group, seconds."""
    commit_s: float = 10.0
    """Longest wait for a commit, seconds."""
    close_s: float = 10.0
    """Longest wait for an orderly end of a client, seconds."""
    session_s: float = 10.0
    """A member that is silent for this long loses its partitions, seconds."""
    heartbeat_s: float = 1.0
    """A member says this often that it lives, seconds."""
    rebalance_s: float = 60.0
    """Members have this long to come back to a rebalance, seconds."""
    max_poll_s: float = 300.0
    """A member that does not poll for this long leaves, seconds: its heartbeats alone prove nothing."""
    fetch_wait_ms: int = 100
    """The broker holds an empty fetch for this long, milliseconds; it bounds the wait for a partition that the fetch
    in flight does not cover."""
    fetch_bytes: int = FETCH_BYTES
    """Most bytes of one partition in one fetch; a larger record still arrives, alone."""
    record_bytes: int = RECORD_BYTES
    """Largest record that is sent, in bytes, key and headers included."""
    linger_ms: int = 0
    """Wait for company before a batch is sent, milliseconds; batches form anyway while one is under way."""


_DENIED = (ClusterAuthorizationFailedError, GroupAuthorizationFailedError, TopicAuthorizationFailedError)
"""An access control list forbids it."""


def _resource(error: KafkaError) -> str:
    """Return what an access error is about; the library names topics as a list, a set or one text."""
    # Who may write to any topic may have a producer, whatever it may do on the cluster.
    kinds = {
        ClusterAuthorizationFailedError: "the cluster or any topic",
        GroupAuthorizationFailedError: "the group",
    }
    named = ", ".join(str(value) for value in error.args if value)
    return f"{kinds.get(type(error), 'the topic')} {named}".strip()


class KafkaLink:
    """One cluster, one prefix."""

    def __init__(
        self, bootstrap: str, *, prefix: str, client_id: str, limits: KafkaLimits, security: Security = PLAINTEXT
    ) -> None:
        self.bootstrap = bootstrap
        self.prefix = prefix
        self.limits = limits
        self._client_id = client_id
        self._security = security
        self._answering = bootstrap
        self._partitions: dict[str, int] = {}
        self._admin: AIOKafkaAdminClient | None = None
        self._offsets: AIOKafkaConsumer | None = None

    def options(self) -> dict[str, Any]:
        """Return what every client is made with."""
        return {
            "bootstrap_servers": self._answering,
            "client_id": self._client_id,
            "request_timeout_ms": int(self.limits.request_s * 1000),
            "retry_backoff_ms": int(_RETRY_S * 1000),
            **self._security.options(),
        }

    async def reach(self) -> None:
        """Find the addresses that answer; clients made next begin there. Raises BusError or ConfigError when none does.

        A client tries its addresses one by one, each for as long as a request may take: a frozen broker would use up
        the whole time for connecting.
        """
        answers = await reach(self.bootstrap, self._security, limit_s=self.limits.connect_s)
        self._answering = ",".join(answer.address for answer in answers)

    def denied(self, operation: str, resource: str) -> str:
        """Return what an access control list refused, for an error."""
        who = f"user {self._security.user!r}" if self._security.user else "this client"
        return f"{who} has no {operation} on {resource}; docs/security.md lists what each service needs"

    def outer(self, partition: TopicPartition) -> KafkaPartition:
        """Return a partition under its name on the cluster."""
        return KafkaPartition(self.prefix + partition.topic, partition.partition)

    def inner(self, partition: KafkaPartition) -> TopicPartition:
        """Return a partition under its name without the prefix."""
        return TopicPartition(partition.topic.removeprefix(self.prefix), partition.partition)

    @asynccontextmanager
    async def guarded(self, limit_s: float, doing: str, *, advice: str = START_ADVICE) -> AsyncIterator[None]:
        """Bound a block, and name what was tried and what to do when it fails."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except (TimeoutError, KafkaError) as error:
            raise self.failure(error, limit_s, doing, advice) from error

    def failure(self, error: TimeoutError | KafkaError, limit_s: float, doing: str, advice: str) -> BusError:
        """Return what an error of the client, or no answer within a limit, means for who was doing something."""
        if isinstance(error, TimeoutError):
            return BusError(f"{doing}: no answer from {self.bootstrap} in {limit_s:g} s; {advice}")
        if isinstance(error, _DENIED):
            return BusError(f"{doing} at {self.bootstrap}: {self.denied('access', _resource(error))}")
        return BusError(f"{doing} at {self.bootstrap}: {type(error).__name__}: {error}")

    async def start(self) -> None:
        """Connect the clients that ask questions; the cluster is known to answer."""
        async with self.guarded(self.limits.connect_s, "connecting"):
            self._admin = AIOKafkaAdminClient(**self.options())
            await self._admin.start()
            self._offsets = AIOKafkaConsumer(**self.options(), enable_auto_commit=False)
            await self._offsets.start()

    async def close(self) -> None:
        """Disconnect."""
        async with self.guarded(self.limits.close_s, "disconnecting"):
            if self._offsets is not None:
                await self._offsets.stop()
            if self._admin is not None:
                await self._admin.close()

    @property
    def admin(self) -> AIOKafkaAdminClient:
        """The client for topics and groups."""
        if self._admin is None:
            raise BusError("the bus is not started: call start() first")
        return self._admin

    async def partitions(self, topic: str) -> int:
        """Return how many partitions a topic has; fixed for the life of a prefix, so asked once."""
        known = self._partitions.get(topic)
        if known is not None:
            return known
        name = self.prefix + topic
        give_up = asyncio.get_running_loop().time() + self.limits.topic_s
        async with self.guarded(self.limits.outage_s, f"looking up topic {name}"):
            while not (found := (await self.patiently(lambda: self.admin.describe_topics([name])))[0])["partitions"]:
                if found["error_code"] == TopicAuthorizationFailedError.errno:
                    raise BusError(f"looking up topic {name} at {self.bootstrap}: {self.denied('DESCRIBE', name)}")
                if asyncio.get_running_loop().time() >= give_up:
                    raise BusError(
                        f"no topic {name} at {self.bootstrap}; "
                        "create the topics with `rollmill broker topics --create`, or check the prefix"
                    )
                await asyncio.sleep(_RETRY_S)
        self._partitions[topic] = len(found["partitions"])
        return self._partitions[topic]

    async def patiently(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Ask until the answer is not one that will pass: no connection, no leader, no coordinator yet.

        The caller's `guarded` sets the limit.
        """
        while True:
            try:
                return await ask()
            except KafkaError as error:
                # The client's own patience ended (a broker restarts); its error says not retriable, and is wrong.
                if not error.retriable and not isinstance(error, KafkaTimeoutError):
                    raise
                await asyncio.sleep(_RETRY_S)

    async def begin_offsets(self, topic: str) -> dict[int, int]:
        """Return partition -> first offset still in the log."""
        return await self._edge(topic, "beginning_offsets")

    async def end_offsets(self, topic: str) -> dict[int, int]:
        """Return partition -> next offset to be written."""
        return await self._edge(topic, "end_offsets")

    async def offsets_since(self, topic: str, since_ms: int) -> dict[int, int]:
        """Return partition -> first offset whose timestamp is not before since_ms; the end where none is."""
        ends = await self.end_offsets(topic)
        wanted = {self.outer(TopicPartition(topic, number)): max(0, since_ms) for number in ends}
        asking = self._offsets
        assert asking is not None, "it was asked for the ends"
        async with self.guarded(self.limits.outage_s, f"asking for the offsets of {self.prefix}{topic} by time"):
            found = await self.patiently(lambda: asking.offsets_for_times(wanted))
        known = {partition.partition: place.offset for partition, place in found.items() if place is not None}
        return {number: known.get(number, end) for number, end in ends.items()}

    async def _edge(self, topic: str, which: str) -> dict[int, int]:
        count = await self.partitions(topic)
        wanted = [self.outer(TopicPartition(topic, number)) for number in range(count)]
        async with self.guarded(self.limits.outage_s, f"asking for the {which} of {self.prefix}{topic}"):
            found = await self.patiently(lambda: getattr(self._offsets, which)(wanted))
        return {partition.partition: offset for partition, offset in sorted(found.items())}

    async def committed(self, group: str, topics: Iterable[str]) -> dict[TopicPartition, Committed]:
        """Return a group's progress on the partitions of these topics that have any."""
        wanted = {self.prefix + topic for topic in topics}
        async with self.guarded(self.limits.outage_s, f"asking for the progress of group {group}"):
            # A fresh cluster makes its offsets topic at the first question; until then it has no coordinator.
            found = await self.patiently(lambda: self.admin.list_consumer_group_offsets(self.prefix + group))
        return {
            self.inner(partition): Committed(progress.offset, progress.metadata or "")
            for partition, progress in found.items()
            if partition.topic in wanted and progress.offset >= 0
        }

    async def settings(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return topic -> its settings on the cluster."""
        asked = [ConfigResource(ConfigResourceType.TOPIC, self.prefix + topic) for topic in topics]
        give_up = asyncio.get_running_loop().time() + self.limits.topic_s
        async with self.guarded(self.limits.outage_s, "reading the settings of topics"):
            while True:
                answers = await self.patiently(lambda: self.admin.describe_configs(asked))
                resources = [resource for answer in answers for resource in answer.resources]
                late = any(resource[0] == UnknownTopicOrPartitionError.errno for resource in resources)
                # Each broker learns of a new topic by itself, and any of them may have been asked.
                if not late or asyncio.get_running_loop().time() >= give_up:
                    break
                await asyncio.sleep(_RETRY_S)
        found: dict[str, dict[str, str]] = {}
        for code, message, _, name, entries in resources:
            if code == TopicAuthorizationFailedError.errno:
                doing = f"reading the settings of {name} at {self.bootstrap}"
                raise BusError(f"{doing}: {self.denied('DESCRIBE_CONFIGS', name)}")
            if code:
                raise BusError(f"reading the settings of {name} at {self.bootstrap}: {message or code}")
            found[name.removeprefix(self.prefix)] = {entry[0]: entry[1] for entry in entries}
        return found

    async def lost(self, partition: TopicPartition, offset: int) -> str | None:
        """Return the message of an OffsetLost: topic, offset, what the log still has, and why; None if it is there.

        A broker that has just taken over a partition may not know its end yet, and refuses what is before it: so an
        offset beyond the end is looked for again, for as long as a topic is.
        """
        topic = partition.topic
        give_up = asyncio.get_running_loop().time() + self.limits.topic_s
        while True:
            begin = (await self.begin_offsets(topic))[partition.partition]
            end = (await self.end_offsets(topic))[partition.partition]
            if begin <= offset <= end:
                return None
            if offset < begin or asyncio.get_running_loop().time() >= give_up:
                break
            await asyncio.sleep(_RETRY_S)
        retention = (await self.settings([topic]))[topic].get("retention.ms", "unknown")
        return (
            f"offset {offset} of {self.prefix}{topic}, partition {partition.partition}, is not in the log, "
            f"which holds {begin} to {end} (retention.ms={retention}); records were removed before they were read: "
            "keep the topic longer, or start over with another group or offset"
        )
