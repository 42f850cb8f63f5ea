"""Failures become records here and nowhere else: another attempt, or a terminal trajectory with the cause.

How often and how late is `schemas/retries.py`. A failure publishes the same work again on a retry tier, so the record
that failed is done and holds up nobody behind it: its task with attempt + 1, for INIT; or, from EVAL, the rollout
itself, since a finished rollout is too dear to be thrown away for a grader's sandbox. When the attempts are used up,
or another one would end the same way, the sample ends as failed and its record goes to `dead`; it never gets a reward.
Any other exception is a bug of the stage: it is logged with its trace and treated as a failure of the infrastructure,
so that one bad sample cannot stop a stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from infra.clock import Clock
from infra.dead_letter import Death
from infra.errors import BusError, Failure
from infra.middleware import Call, Job, Middleware, Output, Result
from infra.terminal import terminal
from infra.wire import first_failed_of
from schemas.messages import Rollout, Task
from schemas.outcome import Boundary, FailureKind
from schemas.retries import Delay, next_delay
from schemas.telemetry import EventKind
from schemas.topics import (
    EVAL_RETRY_5M,
    EVAL_RETRY_5S,
    EVAL_RETRY_30S,
    INIT_RETRY_5M,
    INIT_RETRY_5S,
    INIT_RETRY_30S,
    TRAJECTORIES,
    Topic,
)

log = logging.getLogger(__name__)

INIT_TIERS: Mapping[Delay, Topic[Task]] = {"5s": INIT_RETRY_5S, "30s": INIT_RETRY_30S, "5m": INIT_RETRY_5M}
"""Where a sample starts again."""

EVAL_TIERS: Mapping[Delay, Topic[Rollout]] = {"5s": EVAL_RETRY_5S, "30s": EVAL_RETRY_30S, "5m": EVAL_RETRY_5M}
"""Where a rollout is graded again."""


@dataclass(frozen=True, slots=True)
class Again:
    """What follows a failed attempt."""

    tried: int
    """Attempts made, this one included."""
    output: Output[Any] | None
    """The next attempt; None when there is none."""


Repeat = Callable[[Job, FailureKind], Again]
"""How a stage's work is made again."""


def start_again(job: Job, kind: FailureKind) -> Again:
    """Start the sample again at INIT."""
    task = job.task
    delay = next_delay(kind, task.attempt)
    again = msgspec.structs.replace(task, attempt=task.attempt + 1)
    return Again(task.attempt + 1, Output(INIT_TIERS[delay], again) if delay else None)


def grade_again(job: Job, kind: FailureKind) -> Again:
    """Grade the same rollout again, unless it is the rollout that cannot be used."""
    if kind is FailureKind.ENGINE:
        return start_again(job, kind)
    rollout: Rollout = job.received.message
    delay = next_delay(kind, rollout.gradings)
    again = msgspec.structs.replace(rollout, gradings=rollout.gradings + 1)
    return Again(rollout.gradings + 1, Output(EVAL_TIERS[delay], again) if delay else None)


def retry(clock: Clock, repeat: Repeat = start_again) -> Middleware:
    """Turn failures of a call into records."""

    def around(call: Call) -> Call:
        async def caught(job: Job) -> Result:
            try:
                return await call(job)
            except Failure as failure:
                return failed(job, failure, repeat, clock.now_ms())
            except BusError:
                raise  # the log itself is away: nothing could be written about it
            except (Exception, SystemExit) as error:
                log.exception("%s: unexpected error on %s", job.stage, job.task.id)
                cause = f"{type(error).__name__}: {error}"
                bug = Failure(FailureKind.INFRASTRUCTURE, Boundary.STAGE, cause)
                return failed(job, bug, repeat, clock.now_ms())

        return caught

    return around


def failed(job: Job, failure: Failure, repeat: Repeat, now_ms: int) -> Result:
    """Return the end of one attempt: the next attempt, or a terminal trajectory and a dead letter."""
    again = repeat(job, failure.kind)
    detail = f"{failure.kind.value} at {failure}"
    known = first_failed_of(job.received.record)
    first_failed_ms = now_ms if known is None else known
    if again.output is not None:
        return Result(EventKind.RETRIED, again.output, detail=detail, first_failed_ms=first_failed_ms)
    death = Death(
        stage=job.stage,
        cause=str(failure),
        kind=failure.kind.value,
        attempts=again.tried,
        first_failed_ms=first_failed_ms,
    )
    trajectory = terminal(job.task, failure.outcome(), job.stage)
    return Result(EventKind.FAILED, Output(TRAJECTORIES, trajectory), detail=detail, death=death)
