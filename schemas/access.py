"""What each service must be allowed on a secured cluster, derived from the topic table so that it cannot go stale.

Pure functions to plain data and Markdown. Names stand without the prefix of the run time, which this file does not
know; topics and groups take the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.topics import TABLE, Topic

STAGES = ("init", "run", "eval")
"""Services whose workers share their topics as a consumer group of the stage's name."""

JOINS = {**{stage: stage for stage in STAGES}, "sink": "sink"}
"""Service -> the consumer group that it joins; every other service but the board reads whole topics, in no group."""

JOINS_UNDER = {"board": "board-"}
"""Service -> how the names of its groups begin: each of its lives joins one of its own."""

LOOKS_AT = {"status": STAGES}
"""Service -> groups whose progress it shows."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """What one service needs."""

    service: str
    """Name of the service."""
    reads: tuple[str, ...]
    """Topics: READ."""
    writes: tuple[str, ...]
    """Topics: WRITE."""
    joins: str | None
    """Group: READ."""
    joins_under: str | None
    """Every group whose name begins so: READ."""
    looks_at: tuple[str, ...]
    """Groups: DESCRIBE."""


def access(topics: Sequence[Topic[Any]] = TABLE) -> tuple[Access, ...]:
    """Return what each service of a table needs, beside DESCRIBE and DESCRIBE_CONFIGS on every topic."""
    services = dict.fromkeys(name for topic in topics for name in (*topic.producers, *topic.consumers))
    return tuple(
        Access(
            service=service,
            reads=tuple(topic.name for topic in topics if service in topic.consumers),
            writes=tuple(topic.name for topic in topics if service in topic.producers),
            joins=JOINS.get(service),
            joins_under=JOINS_UNDER.get(service),
            looks_at=LOOKS_AT.get(service, ()),
        )
        for service in services
    )


def access_table(topics: Sequence[Topic[Any]] = TABLE) -> str:
    """Return a Markdown table with one row per service."""
    lines = ["| service | READ on topics | WRITE on topics | on groups |", "|---|---|---|---|"]
    for needed in access(topics):
        groups = [f"READ `{needed.joins}`"] if needed.joins else []
        groups += [f"READ all that begin with `{needed.joins_under}`"] if needed.joins_under else []
        groups += [f"DESCRIBE {_names(needed.looks_at)}"] if needed.looks_at else []
        cells = (needed.service, _names(needed.reads), _names(needed.writes), ", ".join(groups))
        lines.append(f"| {' | '.join(cell or '-' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def acl_commands(service: str, *, prefix: str, user: str, topics: Sequence[Topic[Any]] = TABLE) -> str:
    """Return the calls of Kafka's `kafka-acls.sh` that allow a user to be a service.

    Args:
        service: name of the service.
        prefix: put before every topic and group.
        user: who it logs in as.
        topics: the table.
    """
    (needed,) = (one for one in access(topics) if one.service == service)
    tool = "kafka-acls.sh --bootstrap-server HOST:PORT --command-config admin.properties --add"
    options = [f"--operation Describe --operation DescribeConfigs --topic {prefix} --resource-pattern-type prefixed"]
    for operation, names in (("Read", needed.reads), ("Write", needed.writes)):
        options += [f"--operation {operation} --topic {prefix}{name}" for name in names]
    options += [f"--operation Read --group {prefix}{needed.joins}"] if needed.joins else []
    if needed.joins_under:
        options += [f"--operation Read --group {prefix}{needed.joins_under} --resource-pattern-type prefixed"]
    options += [f"--operation Describe --group {prefix}{name}" for name in needed.looks_at]
    heading = f'acls() {{ {tool} --allow-principal "User:{user}" "$@"; }}'
    return "\n".join([heading, *(f"acls {option}" for option in options)]) + "\n"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
