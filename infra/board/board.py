"""The board: every sample in the pipeline, and what the stages did lately. Pure: events and times in, views out.

Promises: the same events of samples in any order and any number of copies give the same board, as far as memory goes;
memory is bounded by the limits below, whatever the log holds; what is dropped is counted. `sample.py` judges a sample.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict

from infra.board.sample import NEVER, PIPELINE, Sample, State, Stay
from infra.board.view import BoardView, InFlight, SampleView, StageView, StayView
from infra.board.windows import WINDOWS_MS, Windows
from schemas.telemetry import StageEvent
from schemas.topics import SHORT_MS

MAX_SAMPLES = 20_000
"""Samples remembered; beyond, those go first that no stage has, the longest untouched before others."""

MAX_STAGES = 16
"""Stages counted: the pipeline's own and few others, such as services that end samples."""

NAME_CHARS = 200
"""Longest name of a run, a group or a stage; ours are half as long."""

Key = tuple[str, str, int]
"""Run, group, sample."""


class Board:
    """What is known from `events`."""

    def __init__(self, *, max_samples: int = MAX_SAMPLES) -> None:
        self._max = max_samples
        self._working: dict[Key, Sample] = {}
        self._others: OrderedDict[Key, Sample] = OrderedDict()
        self._states: Counter[State] = Counter()
        self._stages = dict.fromkeys(PIPELINE)
        self._windows = Windows()
        self.forgotten = 0
        self.refused = 0

    def take(self, event: StageEvent, worker: str, now_ms: int) -> None:
        """Take one event of a worker."""
        if not self._fits(event):
            self.refused += 1
            return
        self._stages[event.stage] = None
        if not event.run:  # a record that could not be read, and that names no sample: there is only its number
            self._windows.add(event.stage, event.kind, min(event.at_ms, now_ms), now_ms)
            return
        key = (sys.intern(event.run), event.group, event.sample)
        sample = self._working.pop(key, None) or self._others.pop(key, None)
        if sample is None:
            sample = Sample()
        else:
            self._states[sample.state] -= 1
        if sample.take(event, worker, now_ms):
            self._windows.add(event.stage, event.kind, min(event.at_ms, now_ms), now_ms)
        self._states[sample.state] += 1
        (self._working if sample.state is State.WORKING else self._others)[key] = sample
        self._forget()

    def view(self, now_ms: int, *, unreadable: int = 0) -> BoardView:
        """Return the whole board."""
        self._forget_old(now_ms)
        counts = self._windows.counts(now_ms)
        by_stage: dict[str, dict[Key, Sample]] = {stage: {} for stage in self._stages}
        for key, sample in self._working.items():
            by_stage[sample.stage][key] = sample
        nothing: dict[str, dict[str, int]] = {name: {} for name in WINDOWS_MS}
        return BoardView(
            at_ms=now_ms,
            stages=[
                StageView(
                    stage=stage,
                    in_flight=len(samples),
                    oldest=self._oldest(samples, now_ms),
                    counts=counts.get(stage, nothing),
                )
                for stage, samples in by_stage.items()
            ],
            states={state.value: self._states[state] for state in State if self._states[state]},
            forgotten=self.forgotten,
            refused=self.refused,
            unreadable=unreadable,
        )

    def sample(self, run: str, group: str, number: int, now_ms: int) -> SampleView | None:
        """Return what is known of one sample; None if nothing is."""
        key = (run, group, number)
        sample = self._working.get(key) or self._others.get(key)
        if sample is None:
            return None
        return SampleView(
            run=run,
            group=group,
            sample=number,
            state=sample.state.value,
            stage=sample.stage,
            in_flight=_in_flight(key, sample, now_ms) if sample.state is State.WORKING else None,
            stays=[_stay(stage, stay) for stage, stay in sample.stays.items()],
        )

    def _fits(self, event: StageEvent) -> bool:
        if max(len(event.run), len(event.group), len(event.stage)) > NAME_CHARS:
            return False
        return event.stage in self._stages or len(self._stages) < MAX_STAGES

    def _forget(self) -> None:
        while len(self._working) + len(self._others) > self._max:
            if self._others:
                _, sample = self._others.popitem(last=False)
            else:
                sample = self._working.pop(next(iter(self._working)))
                self.forgotten += 1
            self._states[sample.state] -= 1

    def _forget_old(self, now_ms: int) -> None:
        """Drop work that began before anything that the log still holds: whatever became of it was not said."""
        for key, sample in list(self._working.items()):
            if sample.stays[sample.stage].start.at_ms < now_ms - SHORT_MS:
                del self._working[key]
                self._states[State.WORKING] -= 1
                self.forgotten += 1

    def _oldest(self, samples: dict[Key, Sample], now_ms: int) -> InFlight | None:
        if not samples:
            return None
        key = min(samples, key=lambda one: (samples[one].stays[samples[one].stage].start.at_ms, one))
        return _in_flight(key, samples[key], now_ms)


def _in_flight(key: Key, sample: Sample, now_ms: int) -> InFlight:
    run, group, number = key
    stay = sample.stays[sample.stage]
    return InFlight(
        run=run,
        group=group,
        sample=number,
        attempt=stay.start.attempt,
        worker=stay.worker,
        since_ms=stay.start.at_ms,
        age_s=max(0, now_ms - stay.start.at_ms) / 1000,
        waits_for=sample.waits_for(sample.stage),
    )


def _stay(stage: str, stay: Stay) -> StayView:
    ended = stay.end.place != NEVER
    return StayView(
        stage=stage,
        attempt=stay.reached.attempt,
        worker=stay.worker,
        started_ms=stay.start.at_ms if stay.start != NEVER else None,
        ended_ms=stay.end.place.at_ms if ended else None,
        ended=stay.end.kind.value if ended else "",
        detail=stay.end.detail,
    )
