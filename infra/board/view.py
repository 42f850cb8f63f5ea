"""What a board shows, as data: the answer of `GET /board` and `GET /board/sample/<id>`, and what `status` prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A sample that a stage has now."""

    run: str
    """The run."""
    group: str
    """The group."""
    sample: int
    """Sibling number."""
    attempt: int
    """Attempt number."""
    worker: str
    """Who has it."""
    since_ms: int
    """When the worker took it, milliseconds since the epoch."""
    age_s: float
    """How long ago that was, seconds."""
    waits_for: str
    """What it waits for: as somebody said, else what is usual in the stage."""


@dataclass(frozen=True, kw_only=True)
class StageView:
    """One stage."""

    stage: str
    """Its name."""
    in_flight: int = 0
    """Samples that its workers have."""
    oldest: InFlight | None = None
    """The one that was taken first."""
    counts: dict[str, dict[str, int]]
    """Window -> kind of event -> number; kinds that did not occur are left out."""


@dataclass(frozen=True, kw_only=True)
class BoardView:
    """The whole board."""

    at_ms: int
    """When it was looked at, milliseconds since the epoch."""
    stages: list[StageView]
    """Every stage, in the order of the pipeline."""
    states: dict[str, int]
    """State -> samples, of those that are remembered."""
    forgotten: int = 0
    """Samples in flight that were dropped: too many at once, or older than what the log keeps."""
    refused: int = 0
    """Events that were left out: of too many stages, or under names too long to keep."""
    unreadable: int = 0
    """Records that could not be read."""


@dataclass(frozen=True, kw_only=True)
class StayView:
    """A sample in one stage."""

    stage: str
    """Its name."""
    attempt: int
    """Attempt of the last start or end."""
    worker: str
    """Who took it last."""
    started_ms: int | None
    """When it was taken last."""
    ended_ms: int | None
    """When it last ended there."""
    ended: str
    """How, in the words of events; empty if it has not."""
    detail: str
    """Cause of that end."""


@dataclass(frozen=True, kw_only=True)
class SampleView:
    """One sample."""

    run: str
    """The run."""
    group: str
    """The group."""
    sample: int
    """Sibling number."""
    state: str
    """What it is about."""
    stage: str
    """The stage that has it, or that it is queued for."""
    in_flight: InFlight | None
    """More, if a stage has it."""
    stays: list[StayView]
    """Its way through the stages."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the service says about a board and about itself."""

    prefix: str
    """Whose topics it follows."""
    complete: bool
    """It has read all that was in the log at its start, and follows every partition."""
    behind: int
    """Records that it has still to read, at its last look."""
    board: BoardView
    """The board."""
