"""What services say about themselves: events of samples, and metric points.

Both are batched by the sender (one StageEvents record per partition and 100 ms; one Metrics record per second), and
losing some of them never changes what is trained on.
"""

from __future__ import annotations

from enum import StrEnum

from schemas.message import Message, Part


class EventKind(StrEnum):
    """What happened to a sample in a stage."""

    STARTED = "started"
    """A worker took it."""
    FINISHED = "finished"
    """Its output was published and acknowledged."""
    RETRIED = "retried"
    """It failed and another attempt was published."""
    FAILED = "failed"
    """It failed for good; a terminal record was published."""
    EXPIRED = "expired"
    """Its time ran out: it was not started in time, or stayed in the stage longer than its budget."""
    CANCELLED = "cancelled"
    """It was withdrawn."""
    DEAD = "dead"
    """Its record went to `dead`: no stage could end it, being unreadable, too large to pass on, or deadly itself."""
    WAITING = "waiting"
    """It waits for what `detail` names, or, where that is empty, no longer does. No end: it stays in the stage."""


class StageEvent(Part, frozen=True, kw_only=True):
    """One thing that happened to one sample."""

    run: str
    """The run."""
    group: str
    """The group."""
    sample: int
    """Sibling number."""
    attempt: int
    """Attempt number."""
    stage: str
    """Where."""
    kind: EventKind
    """What."""
    at_ms: int
    """When, milliseconds since the epoch."""
    took_ms: int = 0
    """Time inside the stage, for an end."""
    waited_ms: int = 0
    """Time in the queue before the start."""
    detail: str = ""
    """Cause of a failure, or what is waited for."""


class StageEvents(Message, frozen=True, kw_only=True, tag="rollmill.stage_events"):
    """Events of one worker."""

    worker: str
    """Who says so."""
    events: tuple[StageEvent, ...]
    """What happened, oldest first."""


class MetricPoint(Part, frozen=True, kw_only=True):
    """One measured value."""

    name: str
    """Dotted name with its unit last, such as `run.turn_s`."""
    value: float
    """The value."""
    at_ms: int
    """When, milliseconds since the epoch."""
    step: int = 0
    """Trainer step or policy version it belongs to; 0 if none."""
    labels: dict[str, str] = {}
    """Dimensions to group by."""


class Metrics(Message, frozen=True, kw_only=True, tag="rollmill.metrics"):
    """Points of one service for one run."""

    run: str
    """The run; empty for a service that serves several."""
    service: str
    """Who measured."""
    points: tuple[MetricPoint, ...]
    """The values, oldest first."""
