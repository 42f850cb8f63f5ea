"""Says what happens to each sample in a stage: started, what it waits for meanwhile, and how it ended.

The outermost middleware, so that it sees what the others made of a failure. How events reach the log is
`infra/events.py`; work that is cancelled, by a stop or a rebalance, has no end here: whoever takes it over has. A
record that became no job, or no output, is reported too, as far as its headers name a sample.
"""

from __future__ import annotations

from infra.bus import Record
from infra.clock import Clock
from infra.dead_letter import Death
from infra.events import EventLog
from infra.middleware import Call, Job, Middleware, Result
from infra.waiting import heard_by
from schemas.telemetry import EventKind, StageEvent

WAITS_EVERY_S = 5.0
"""What a sample waits for is said at most this often, seconds."""


def events(log: EventLog, clock: Clock) -> Middleware:
    """Report the start and the end of every job."""

    def around(call: Call) -> Call:
        async def reported(job: Job) -> Result:
            began = clock.now_ms()
            waited = max(0, began - job.received.record.timestamp_ms)
            log.add(_event(job, EventKind.STARTED, began, waited_ms=waited))
            with heard_by(_Waits(log, clock, job)):
                result = await call(job)
            now = clock.now_ms()
            log.add(_event(job, result.kind, now, took_ms=now - began, detail=result.detail))
            return result

        return reported

    return around


def dead_event(record: Record, death: Death, at_ms: int) -> StageEvent:
    """Return the event of a record that went to `dead` without a terminal record."""
    headers = dict(record.headers)
    run, _, rest = headers.get("ce_subject", b"").decode(errors="replace").partition("/")
    group, _, sample = rest.rpartition("/")
    return StageEvent(
        run=run,
        group=group,
        sample=_number(sample),
        attempt=_number(headers.get("attempt", b"").decode(errors="replace")),
        stage=death.stage,
        kind=EventKind.DEAD,
        at_ms=at_ms,
        detail=f"{death.kind}, {record.topic}:{record.partition}:{record.offset}: {death.cause}",
    )


def _number(text: str) -> int:
    """Return a count that anyone may have written, 0 if it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


class _Waits:
    """Says what one job waits for: changes alone, and none but the end of the wait sooner than WAITS_EVERY_S."""

    def __init__(self, log: EventLog, clock: Clock, job: Job) -> None:
        self._log = log
        self._clock = clock
        self._job = job
        self._said = ""
        self._again_at = 0.0

    def __call__(self, what: str) -> None:
        now = self._clock.monotonic()
        if what == self._said or (what and now < self._again_at):
            return
        if what:
            self._again_at = now + WAITS_EVERY_S
        self._said = what
        self._log.add(_event(self._job, EventKind.WAITING, self._clock.now_ms(), detail=what))


def _event(
    job: Job, kind: EventKind, at_ms: int, *, took_ms: int = 0, waited_ms: int = 0, detail: str = ""
) -> StageEvent:
    task = job.task
    return StageEvent(
        run=task.run,
        group=task.group,
        sample=task.sample,
        attempt=task.attempt,
        stage=job.stage,
        kind=kind,
        at_ms=at_ms,
        took_ms=took_ms,
        waited_ms=waited_ms,
        detail=detail,
    )
