"""What a topic looks like on a broker, compared with its line in the table: pure, shared by every bus.

Only what the table promises is compared: partitions, clean-up, retention, largest record. Anything else (replicas,
segment sizes) belongs to whoever runs the broker.
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


def shape_of(topic: Topic[Any]) -> Shape:
    """Return the shape that the table asks for."""
    return Shape(
        partitions=topic.partitions,
        cleanup="compact" if topic.compacted else "delete",
        retention_ms=topic.retention_ms,
        max_bytes=topic.max_bytes,
    )


def configs(shape: Shape) -> dict[str, str]:
    """Return the shape as Kafka's topic settings."""
    settings = {"cleanup.policy": shape.cleanup, "max.message.bytes": str(shape.max_bytes)}
    if shape.retention_ms is not None:
        settings["retention.ms"] = str(shape.retention_ms)
    return settings


def require(topics: Iterable[Topic[Any]], found: Mapping[str, Shape], *, prefix: str, where: str) -> None:
    """Raise ConfigError listing every topic that is missing or differs from the table.

    Args:
        topics: lines of the table.
        found: topic name without the prefix -> what the broker has.
        prefix: put before the names in the message.
        where: the broker, for the message.
    """
    problems = [problem for topic in topics for problem in _problems(topic, found.get(topic.name), prefix)]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(
            f"the topics on {where} are not those of the table:\n{lines}\n"
            "create missing ones with `rollmill broker topics --create`; for one that differs use another prefix, "
            "or alter it with Kafka's own tools"
        )


def _problems(topic: Topic[Any], found: Shape | None, prefix: str) -> list[str]:
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
    return [f"{name}: {what} is {has}, the table says {wants}" for what, has, wants in pairs if has != wants]
