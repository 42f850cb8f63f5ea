"""One sample on the board: what its events, in any order and any number of copies, say about where it is. Pure.

Events of one sample come from several workers, late, twice, or never: a worker that was killed says no more. So nothing
here depends on the order of arrival. Every start and end has a place in the sample's life, (attempt, time), and a start
holds as long as nothing of an equal or later place contradicts it:

- an end in the same stage: it has ended; a later start in the same stage: it was started again, by another worker;
- anything in a later stage: its output was passed on, whoever could not say so any more;
- anything of a higher attempt: it was retried;
- a later end of the sample as a whole, in whatever stage and at whatever attempt.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from schemas.telemetry import EventKind, StageEvent

PIPELINE = {
    "init": "an environment",
    "run": "the policy, or its environment",
    "eval": "its grade",
}
"""The stages in order -> what a sample in it waits for, when nobody says it better."""

ORDER = {stage: number for number, stage in enumerate(PIPELINE)}
"""Stage -> how far down the pipeline it is."""

LAST = "eval"
"""The stage whose `finished` ends a sample."""

TERMINAL = frozenset({EventKind.FAILED, EventKind.EXPIRED, EventKind.CANCELLED})
"""Ends of the sample as a whole, in any stage."""

MAX_STAGES = 8
"""Stages of one sample that are kept; more come from no pipeline of ours."""

MAX_MARKS = 16
"""Starts and ends of one stage by which a copy is recognised; more than any number of attempts makes."""

TEXT_CHARS = 300
"""Longest text kept of an event: a cause, a worker's name, what is waited for."""


class State(StrEnum):
    """What a sample is about."""

    WORKING = "working"
    """A worker of a stage has it."""
    QUEUED = "queued"
    """A stage finished it, and the next has not started."""
    RETRYING = "retrying"
    """It failed and will be tried again."""
    DONE = "done"
    """It was graded."""
    FAILED = "failed"
    """It failed for good."""
    EXPIRED = "expired"
    """Its time ran out."""
    CANCELLED = "cancelled"
    """It was withdrawn."""
    DEAD = "dead"
    """Its record went to `dead`, and nothing of it goes on."""
    UNKNOWN = "unknown"
    """Its events do not say."""


_ENDED = {
    EventKind.FINISHED: State.DONE,
    EventKind.FAILED: State.FAILED,
    EventKind.EXPIRED: State.EXPIRED,
    EventKind.CANCELLED: State.CANCELLED,
}


class Place(NamedTuple):
    """A point in the life of a sample; later ones are greater."""

    attempt: int
    at_ms: int


class End(NamedTuple):
    """How a stage ended it."""

    place: Place
    kind: EventKind
    detail: str


NEVER = Place(-1, 0)
"""Before every place."""

NO_END = End(NEVER, EventKind.FINISHED, "")
"""Of a stage that has not ended it."""


@dataclass(slots=True)
class Stay:
    """A sample in one stage."""

    start: Place = NEVER
    """Its last start."""
    worker: str = ""
    """Who started it last."""
    end: End = NO_END
    """Its last end."""
    wait: tuple[Place, str] = (NEVER, "")
    """What was said last about what it waits for."""
    marks: tuple[tuple[EventKind, int, int], ...] = ()
    """Starts and ends that were counted, oldest first."""

    @property
    def reached(self) -> Place:
        """The last thing that happened here."""
        return max(self.start, self.end.place)

    def mark(self, event: StageEvent) -> bool:
        """Take note of a start or an end; False for a copy of one that was taken."""
        mark = (event.kind, event.attempt, event.at_ms)
        if mark in self.marks:
            return False
        self.marks = (*self.marks[1 - MAX_MARKS :], mark)
        return True

    def take(self, event: StageEvent, place: Place, worker: str) -> None:
        """Move on to what an event says, if that is later than what is known."""
        text = event.detail[:TEXT_CHARS]
        if event.kind is EventKind.WAITING:
            # One worker says this, in order: of two at the same moment the second one holds.
            self.wait = (place, text) if place >= self.wait[0] else self.wait
        elif event.kind is EventKind.STARTED:
            self.start, self.worker = max((self.start, self.worker), (place, sys.intern(worker[:TEXT_CHARS])))
        else:
            self.end = max(self.end, End(place, event.kind, text))


class Sample:
    """What is known of one sample."""

    __slots__ = ("ended", "over_ms", "stage", "state", "stays")

    def __init__(self) -> None:
        self.stays: dict[str, Stay] = {}
        self.ended: End | None = None
        """Its first end as a whole: in the log the first one counts."""
        self.over_ms = -1
        """When its last such end was."""
        self.state = State.UNKNOWN
        self.stage = ""
        """Where it is: the stage that has it, or, when it is queued, the one it waits for."""

    def take(self, event: StageEvent, worker: str, now_ms: int) -> bool:
        """Take an event and tell whether it is news: a start or an end that was not taken before."""
        if event.stage not in self.stays and len(self.stays) == MAX_STAGES:
            return False
        stay = self.stays.setdefault(sys.intern(event.stage), Stay())  # few names, in tens of thousands of samples
        if event.kind is not EventKind.WAITING and not stay.mark(event):
            return False
        # A clock that is ahead must not keep a sample in the future, where nothing could contradict it.
        place = Place(event.attempt, min(event.at_ms, now_ms))
        stay.take(event, place, worker)
        if event.kind in TERMINAL or (event.kind is EventKind.FINISHED and event.stage == LAST):
            end = End(place, event.kind, event.detail[:TEXT_CHARS])
            self.ended = end if self.ended is None else min(self.ended, end, key=lambda one: (one.place.at_ms, one))
            self.over_ms = max(self.over_ms, place.at_ms)
        self.state, self.stage = self._where()
        return event.kind is not EventKind.WAITING

    def in_flight(self, stage: str) -> bool:
        """Tell whether a stage has it now."""
        return self.state is State.WORKING and self.stage == stage

    def waits_for(self, stage: str) -> str:
        """Return what it waits for in a stage that has it: as somebody said, or what is usual there."""
        stay = self.stays[stage]
        said_at, said = stay.wait
        return said if said and said_at >= stay.start else PIPELINE.get(stage, "")

    def _where(self) -> tuple[State, str]:
        working = [stage for stage in self.stays if self._holds(stage)]
        if working:
            return State.WORKING, max(working, key=lambda stage: (self.stays[stage].start, _order(stage)))
        if self.ended is not None:
            return _ENDED[self.ended.kind], ""
        stage, stay = max(self.stays.items(), key=lambda item: (item[1].reached, _order(item[0])))
        if stay.end.place < stay.start or stay.end.place == NEVER:
            return State.UNKNOWN, ""
        if stay.end.kind is EventKind.FINISHED:
            return State.QUEUED, _next(stage)
        return (State.RETRYING if stay.end.kind is EventKind.RETRIED else State.DEAD), ""

    def _holds(self, stage: str) -> bool:
        """Tell whether a stage's last start still stands."""
        start = self.stays[stage].start
        # By time alone: whoever ends a sample from outside may not know which attempt it is at.
        if start == NEVER or self.over_ms >= start.at_ms:
            return False
        return not any(
            other.reached.attempt > start.attempt
            or (_order(name) > _order(stage) and other.reached >= start)
            or (name == stage and other.end.place >= start)
            for name, other in self.stays.items()
        )


def _order(stage: str) -> int:
    return ORDER.get(stage, -1)


def _next(stage: str) -> str:
    """Return the stage behind one, or nothing."""
    return next((name for name, number in ORDER.items() if stage in ORDER and number == ORDER[stage] + 1), "")
