"""The flow, as one table: read this and you know the system.

    producers -> tasks -> INIT -> episodes -> RUN -> rollouts -> EVAL -> trajectories -> trainer -> decisions

Each line says what a topic carries, how records are spread, who writes and reads it, and how long it is kept. Code
uses the constants; `rollmill broker topics --create` makes the topics from this table; a test compares the declared
producers and consumers with the real ones; the diagram in ARCHITECTURE.md is generated from it. All names take a
prefix at run time (default `rollmill.`), which this file does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from schemas.control import (
    Backend,
    Breaker,
    Cancel,
    Control,
    Credit,
    Cursor,
    FeederStarted,
    PolicyVersion,
    Quarantine,
    RunManifest,
)
from schemas.decisions import (
    Alarm,
    Branch,
    Decision,
    Evaluated,
    GroupDropped,
    RunEnded,
    StepDecided,
    TrainerStarted,
    VersionPublished,
)
from schemas.limits import BATCH_BYTES
from schemas.message import Message
from schemas.messages import Episode, Rollout, Task, Trajectory
from schemas.telemetry import Metrics, StageEvents

M_co = TypeVar("M_co", bound=Message, covariant=True)

DEFAULT_PREFIX = "rollmill."
"""Put before every topic name unless the configuration says otherwise."""

HOUR_MS = 3_600_000
"""Milliseconds in an hour."""

SHORT_MS = 24 * HOUR_MS
"""Kept for looking at what goes on now; nothing that counts depends on it."""

STAGE_MS = 7 * 24 * HOUR_MS
"""Kept for the work between stages: longer than a stage may stand still."""

LONG_MS = 90 * 24 * HOUR_MS
"""Kept for replay and proof: what was decided, and from what. No topic with a retention keeps anything longer."""


class Spread(StrEnum):
    """How records find their partition."""

    ROUND_ROBIN = "round robin"
    """Evenly; no order is needed between samples."""
    RUN = "murmur2(run)"
    """All records of a run in one partition: the log arbitrates by offset."""
    SAMPLE = "murmur2(sample)"
    """All records of a sample in one partition."""
    SINGLE = "one partition"
    """The topic has a single partition."""
    AS_IT_WAS = "as it was"
    """The partition of the record it came from."""


class Opaque(Message, frozen=True, kw_only=True, tag="rollmill.opaque"):
    """Bytes that are passed on as they are: `dead` carries what was given up."""


@dataclass(frozen=True, kw_only=True)
class Topic(Generic[M_co]):
    """One line of the table."""

    name: str
    """Name without the prefix."""
    carries: tuple[type[M_co], ...]
    """Message types that may appear on it."""
    partitions: int
    """Number of partitions; fixed for the life of a prefix."""
    spread: Spread
    """How records find their partition."""
    producers: tuple[str, ...]
    """Who writes it."""
    consumers: tuple[str, ...]
    """Who reads it."""
    retention_ms: int | None
    """Kept this long; None for a compacted topic."""
    delay_ms: int = 0
    """A retry tier: a record is handled this long after its timestamp, so that the head is always the earliest due."""
    max_bytes: int = BATCH_BYTES
    """Largest batch of records that the broker takes, in bytes."""

    @property
    def compacted(self) -> bool:
        """Tell whether only the last record per key is kept."""
        return self.retention_ms is None

    def __str__(self) -> str:
        return self.name


STAGE_PARTITIONS = 32
"""Partitions of a stage topic: the most workers of one stage that can share the work."""

RETRY_PARTITIONS = 4
"""Partitions of a retry tier: failures are few, and their delay is not shortened by more workers."""

TASKS: Topic[Task] = Topic(
    name="tasks",
    carries=(Task,),
    partitions=STAGE_PARTITIONS,
    spread=Spread.ROUND_ROBIN,
    producers=("producer", "feeder", "redrive"),
    consumers=("init", "reaper", "sink", "cancel", "redrive"),
    retention_ms=STAGE_MS,
)
INIT_RETRY_5S: Topic[Task] = Topic(
    name="init.retry.5s",
    carries=(Task,),
    partitions=RETRY_PARTITIONS,
    spread=Spread.ROUND_ROBIN,
    producers=("init", "run", "eval"),
    consumers=("init",),
    retention_ms=STAGE_MS,
    delay_ms=5_000,
)
INIT_RETRY_30S: Topic[Task] = Topic(
    name="init.retry.30s",
    carries=(Task,),
    partitions=RETRY_PARTITIONS,
    spread=Spread.ROUND_ROBIN,
    producers=("init", "run", "eval"),
    consumers=("init",),
    retention_ms=STAGE_MS,
    delay_ms=30_000,
)
INIT_RETRY_5M: Topic[Task] = Topic(
    name="init.retry.5m",
    carries=(Task,),
    partitions=RETRY_PARTITIONS,
    spread=Spread.ROUND_ROBIN,
    producers=("init", "run", "eval"),
    consumers=("init",),
    retention_ms=STAGE_MS,
    delay_ms=300_000,
)
EPISODES: Topic[Episode] = Topic(
    name="episodes",
    carries=(Episode,),
    partitions=STAGE_PARTITIONS,
    spread=Spread.ROUND_ROBIN,
    producers=("init",),
    consumers=("run",),
    retention_ms=STAGE_MS,
)
ROLLOUTS: Topic[Rollout] = Topic(
    name="rollouts",
    carries=(Rollout,),
    partitions=STAGE_PARTITIONS,
    spread=Spread.ROUND_ROBIN,
    producers=("run",),
    consumers=("eval",),
    retention_ms=STAGE_MS,
)
EVAL_RETRY_5S: Topic[Rollout] = Topic(
    name="eval.retry.5s",
    carries=(Rollout,),
    partitions=RETRY_PARTITIONS,
    spread=Spread.ROUND_ROBIN,
    producers=("eval",),
    consumers=("eval",),
    retention_ms=STAGE_MS,
    delay_ms=5_000,
)
EVAL_RETRY_30S: Topic[Rollout] = Topic(
    name="eval.retry.30s",
    carries=(Rollout,),
    partitions=RETRY_PARTITIONS,
    spread=Spread.ROUND_ROBIN,
    producers=("eval",),
    consumers=("eval",),
    retention_ms=STAGE_MS,
    delay_ms=30_000,
)
EVAL_RETRY_5M: Topic[Rollout] = Topic(
    name="eval.retry.5m",
    carries=(Rollout,),
    partitions=RETRY_PARTITIONS,
    spread=Spread.ROUND_ROBIN,
    producers=("eval",),
    consumers=("eval",),
    retention_ms=STAGE_MS,
    delay_ms=300_000,
)
TRAJECTORIES: Topic[Trajectory] = Topic(
    name="trajectories",
    carries=(Trajectory,),
    partitions=8,
    spread=Spread.RUN,
    producers=("init", "run", "eval", "reaper", "producer"),
    consumers=("trainer", "reaper", "sink", "replay", "producer", "cancel", "redrive", "status"),
    retention_ms=LONG_MS,
)
DECISIONS: Topic[Decision] = Topic(
    name="decisions",
    carries=(TrainerStarted, StepDecided, GroupDropped, VersionPublished, RunEnded, Branch, Evaluated, Alarm),
    partitions=8,
    spread=Spread.RUN,
    producers=("trainer",),
    consumers=("trainer", "replay", "feeder", "status", "sink"),
    retention_ms=LONG_MS,
)
EVENTS: Topic[StageEvents] = Topic(
    name="events",
    carries=(StageEvents,),
    partitions=4,
    spread=Spread.SAMPLE,
    producers=("init", "run", "eval", "reaper"),
    consumers=("board", "status", "sink"),
    retention_ms=SHORT_MS,
)
METRICS: Topic[Metrics] = Topic(
    name="metrics",
    carries=(Metrics,),
    partitions=4,
    spread=Spread.RUN,
    producers=("init", "run", "eval", "trainer", "policy"),
    consumers=("status", "sink"),
    retention_ms=SHORT_MS,
)
CONTROL: Topic[Control] = Topic(
    name="control",
    carries=(RunManifest, Credit, Cursor, FeederStarted, PolicyVersion, Quarantine, Cancel, Breaker, Backend),
    partitions=1,
    spread=Spread.SINGLE,
    producers=("producer", "feeder", "trainer", "policy", "cancel", "backends", "reaper", "init", "run"),
    consumers=(
        "producer",
        "feeder",
        "policy",
        "status",
        "redrive",
        "cancel",
        "backends",
        "init",
        "run",
        "eval",
        "reaper",
        "envhost",
    ),
    retention_ms=None,
)
DEAD: Topic[Opaque] = Topic(
    name="dead",
    carries=(Opaque,),
    partitions=STAGE_PARTITIONS,
    spread=Spread.AS_IT_WAS,
    producers=("init", "run", "eval", "sink", "reaper"),
    consumers=("sink", "redrive", "reaper"),
    retention_ms=LONG_MS,
)

TABLE: tuple[Topic[Message], ...] = (
    TASKS,
    INIT_RETRY_5S,
    INIT_RETRY_30S,
    INIT_RETRY_5M,
    EPISODES,
    ROLLOUTS,
    EVAL_RETRY_5S,
    EVAL_RETRY_30S,
    EVAL_RETRY_5M,
    TRAJECTORIES,
    DECISIONS,
    EVENTS,
    METRICS,
    CONTROL,
    DEAD,
)
