"""What a topic looks like on a broker, compared with its line in the table: pure, shared by every bus.

Only what the table promises is compared: partitions, clean-up, retention, largest record; and, where the configuration
asks for it, how many copies there are. Anything else (segment sizes) belongs to whoever runs the broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from infra.errors import ConfigError
from schemas.topics import Topic


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The properties of a topic that the table fixes."""

    partitions: int
    """Number of partitions."""
    cleanup: str
    """`delete` or `compact` (Kafka's `cleanup.policy`)."""
    retention_ms: int | None
    """Kept this long; None when compacted, -1 for ever."""
    max_bytes: int
    """Largest record batch the broker takes."""
    replicas: int = 1
    """Copies of the partition that has the fewest."""
    min_insync: int = 1
    """Copies that must have a record before it is acknowledged."""


@dataclass(frozen=True, kw_only=True)
class Durability:
    """How many copies of a record are wanted; the table knows no cluster, so this comes from the configuration."""

    replicas: int | None = None
    """Copies of each partition; None: as many as the cluster makes by itself."""
    min_insync: int | None = None
    """Copies that must have a record before it is acknowledged; None: as the cluster has it."""


ANY_COPIES = Durability()
"""Whatever the cluster does by itself."""


def shape_of(topic: Topic[Any]) -> Shape:
    """Return the shape that the table asks for."""
    return Shape(
        partitions=topic.partitions,
        cleanup="compact" if topic.compacted else "delete",
        retention_ms=topic.retention_ms,
        max_bytes=topic.max_bytes,
    )


def configs(shape: Shape, durability: Durability = ANY_COPIES) -> dict[str, str]:
    """Return the shape as Kafka's topic settings."""
    settings = {"cleanup.policy": shape.cleanup, "max.message.bytes": str(shape.max_bytes)}
    if durability.min_insync is not None:
        settings["min.insync.replicas"] = str(durability.min_insync)
    if shape.retention_ms is not None:
        settings["retention.ms"] = str(shape.retention_ms)
    return settings


def require(
    topics: Iterable[Topic[Any]],
    found: Mapping[str, Shape],
    *,
    prefix: str,
    where: str,
    durability: Durability = ANY_COPIES,
) -> None:
    """Raise ConfigError listing every topic that is missing or differs from the table.

    Args:
        topics: lines of the table.
        found: topic name without the prefix -> what the broker has.
        prefix: put before the names in the message.
        where: the broker, for the message.
        durability: copies that are wanted; more do no harm.
    """
    problems = [problem for topic in topics for problem in _problems(topic, found.get(topic.name), prefix, durability)]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(
            f"the topics on {where} are not those of the table:\n{lines}\n"
            "create missing ones with `rollmill broker topics --create`; for one that differs use another prefix, "
            "or alter it with Kafka's own tools"
        )


def _problems(topic: Topic[Any], found: Shape | None, prefix: str, durability: Durability) -> list[str]:
    name = f"{prefix}{topic.name}"
    if found is None:
        return [f"{name}: missing"]
    wanted = shape_of(topic)
    pairs = (
        ("partitions", found.partitions, wanted.partitions),
        ("cleanup.policy", found.cleanup, wanted.cleanup),
        ("retention.ms", found.retention_ms, wanted.retention_ms),
        ("max.message.bytes", found.max_bytes, wanted.max_bytes),
    )
    differs = [f"{name}: {what} is {has}, the table says {wants}" for what, has, wants in pairs if has != wants]
    return differs + _too_few_copies(name, found, durability)


def _too_few_copies(name: str, found: Shape, durability: Durability) -> list[str]:
    """Return what would lose a record that was acknowledged, or could never acknowledge one."""
    problems = []
    if durability.replicas is not None and found.replicas < durability.replicas:
        problems.append(f"{name}: a partition has {found.replicas} copies, bus.replication is {durability.replicas}")
    if durability.min_insync is not None and found.min_insync < durability.min_insync:
        problems.append(f"{name}: min.insync.replicas is {found.min_insync}, bus.min_insync is {durability.min_insync}")
    if found.min_insync > found.replicas:
        problems.append(
            f"{name}: min.insync.replicas is {found.min_insync} but there are only {found.replicas} copies: "
            "nothing can ever be published to it"
        )
    return problems
