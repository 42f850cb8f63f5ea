"""What the sink stores, as one table: which topics it reads, into which tables, and how long rows may wait.

A line is added here, its rows in `rows.py`, its table in `schema.sql`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infra.bus import Bus, Record
from infra.clickhouse import rows
from infra.clickhouse.rows import Rows
from infra.wire import Received, unpack
from schemas import topics
from schemas.topics import Topic


@dataclass(frozen=True)
class Stream:
    """One topic that is stored."""

    topic: Topic[Any]
    rows: Callable[[Received[Any]], Rows] | None
    """Rows of a decoded record; None for `dead`, whose records need not be readable."""
    wait_s: float
    """Longest time that a row waits for company: a partition's insert costs about the same for one row as for many."""
    buried_elsewhere: bool = False
    """A stage reads this topic too and sends what cannot be decoded to `dead`."""

    async def read(self, record: Record, bus: Bus) -> Rows:
        """Return the rows of a record of this log.

        Raises:
            schemas.codec.DecodeError: the bytes are not a message of this topic.
            infra.clickhouse.rows.RowError: a value fits no column.
        """
        if self.rows is None:
            return rows.dead_rows(record)
        return self.rows(await unpack(self.topic, record, bus))


STREAMS = (
    Stream(topics.TASKS, rows.task_rows, wait_s=2.0, buried_elsewhere=True),
    Stream(topics.TRAJECTORIES, rows.trajectory_rows, wait_s=1.0),
    Stream(topics.DECISIONS, rows.decision_rows, wait_s=1.0),
    Stream(topics.EVENTS, rows.event_rows, wait_s=2.0),
    Stream(topics.METRICS, rows.metric_rows, wait_s=1.0),
    Stream(topics.DEAD, None, wait_s=2.0),
)
