"""Follows one run while it goes on: its decisions, its metrics, and what its samples do in the stages.

Reads `decisions`, `metrics` and `events` from where they end when the watch starts; it decides nothing and commits
nothing. What it shows is what any consumer of these topics can show.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from infra.bus import Bus, Reader, Record, TopicPartition
from infra.clock import Clock, wait_for
from infra.errors import BusError, OffsetLost, WaitTimeout
from infra.wire import unpack
from schemas.codec import DecodeError
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
    undone_by,
)
from schemas.scores import Purpose, Scores
from schemas.telemetry import EventKind, Metrics, StageEvent, StageEvents
from schemas.topics import DECISIONS, EVENTS, METRICS

POLL_S = 0.25
"""One poll lasts at most this long, and so does a look at the state, seconds."""

BATCH = 500
"""Most records of one poll."""

AWAY_S = 1.0
"""Pause before a log that is away is read again, seconds."""

log = logging.getLogger(__name__)

_TOPICS = {topic.name: topic for topic in (DECISIONS, METRICS, EVENTS)}


@dataclass
class RunState:
    """What is known of a run."""

    trainers: int = 0
    """Trainers that took the run over."""
    decided: int = 0
    """Last step decided."""
    step: int = 0
    """Last step whose weights were announced; its checkpoint exists."""
    version: int = 0
    """Last version announced."""
    kept: int = 0
    """Groups trained on, in steps that were not undone."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups dropped, by reason."""
    ended: str | None = None
    """Why the run ended, once it has."""
    evaluated: dict[int, Scores] = field(default_factory=dict)
    """Step -> what its version achieved on the validation suite."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Last value of each metric of the run."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, mean success of the batch's groups and the dropped ones around it)."""
    finished: Counter[str] = field(default_factory=Counter)
    """Samples that went through a stage, by stage."""
    in_flight: Counter[str] = field(default_factory=Counter)
    """Samples in a stage now, by stage."""
    repeated: int = 0
    """Times that a stage started the same attempt of a sample again: work repeated after a crash."""
    failures: Counter[str] = field(default_factory=Counter)
    """Ends without a grade, by kind."""


class RunWatch:
    """Follows one run."""

    def __init__(self, bus: Bus, clock: Clock, run: str) -> None:
        self.state = RunState()
        self._bus = bus
        self._clock = clock
        self._run = run
        self._reader: Reader | None = None
        self._epoch: int | None = None
        self._started: set[tuple[str, str, int, int]] = set()
        self._open: set[tuple[str, str, int, int]] = set()
        self._groups: dict[int, int] = {}
        """Live step -> groups trained on in it."""
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Begin at the end of the topics."""
        start = {
            TopicPartition(name, part): offset
            for name in _TOPICS
            for part, offset in (await self._bus.end_offsets(name)).items()
        }
        self._reader = await self._bus.read(start)

    async def follow(self) -> None:
        """Read until cancelled; call `start` first."""
        assert self._reader is not None, "start the watch before following"
        try:
            while True:
                try:
                    records = await self._reader.poll(BATCH, POLL_S)
                except OffsetLost:
                    raise  # waiting brings nothing back
                except BusError as error:
                    # The services wait a broker's restart out, and so does whoever watches them.
                    log.info("the log is away, the watch goes on: %s", error)
                    await self._clock.sleep(AWAY_S)
                    continue
                for record in records:
                    await self._take(record)
                self._changed.set()
        finally:
            await self._reader.close()

    async def until(self, condition: Callable[[RunState], bool], what: str, limit_s: float) -> None:
        """Return once the state fulfils a condition.

        Raises:
            WaitTimeout: it did not in time; names `what` was waited for.
        """
        until = self._clock.monotonic() + limit_s
        while not condition(self.state):
            if self._clock.monotonic() > until:
                raise WaitTimeout(f"waited {limit_s:g} s for {what} of run {self._run!r}; it stands at {self.state}")
            self._changed.clear()
            await wait_for(self._changed, self._clock, POLL_S)

    async def _take(self, record: Record) -> None:
        try:
            message = (await unpack(_TOPICS[record.topic], record, self._bus)).message
        except DecodeError:
            return  # nothing here depends on one record; the sink reports it
        match message:
            case StageEvents():
                for event in message.events:
                    if event.run == self._run:
                        self._take_event(event)
            case Metrics() if message.run == self._run:
                self._take_metrics(message)
            case (
                StepDecided()
                | GroupDropped()
                | VersionPublished()
                | RunEnded()
                | TrainerStarted()
                | Branch()
                | Evaluated()
                | Alarm()
            ):
                if message.run == self._run and self._live(message, record.offset):
                    self._take_decision(message)

    def _live(self, decision: Decision, offset: int) -> bool:
        """Tell whether a decision counts: not that of a trainer which another one has replaced meanwhile."""
        if isinstance(decision, TrainerStarted):
            self._epoch = offset
            return True
        return self._epoch in {None, decision.epoch}

    def _take_decision(self, decision: Decision) -> None:
        state = self.state
        match decision:
            case TrainerStarted():
                state.trainers += 1
            case StepDecided():
                state.decided = decision.step
                self._groups[decision.step] = len({member.group for member in decision.members})
                state.kept = sum(self._groups.values())
            case GroupDropped():
                state.dropped[decision.reason.value] += 1
            case VersionPublished():
                state.step, state.version = max(state.step, decision.step), decision.version
            case RunEnded():
                state.ended = decision.reason
            case Branch():
                for step in undone_by(list(self._groups), decision):
                    del self._groups[step]
                state.decided, state.kept = decision.from_step, sum(self._groups.values())
                state.step = min(state.step, decision.from_step)
                state.evaluated = {step: s for step, s in state.evaluated.items() if step <= decision.from_step}
            case Evaluated():
                if decision.purpose is Purpose.EVALUATION:
                    state.evaluated[decision.step] = decision.scores

    def _take_metrics(self, message: Metrics) -> None:
        for point in message.points:
            self.state.metrics[point.name] = point.value
            if point.name == "trainer.recent_success_mean":
                self.state.curve.append((point.step, point.value))

    def _take_event(self, event: StageEvent) -> None:
        state = self.state
        key = (event.stage, event.group, event.sample, event.attempt)
        if event.kind is EventKind.STARTED:
            state.repeated += key in self._started
            state.in_flight[event.stage] += key not in self._open
            self._started.add(key)
            self._open.add(key)
            return
        if event.kind is EventKind.WAITING:
            return
        if key in self._open:  # what began before the watch was never counted in
            self._open.remove(key)
            state.in_flight[event.stage] -= 1
        if event.kind is EventKind.FINISHED:
            state.finished[event.stage] += 1
        else:
            state.failures[event.kind.value] += 1
