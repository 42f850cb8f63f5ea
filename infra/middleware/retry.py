"""Failures become records here and nowhere else: another attempt, or a terminal trajectory with the cause.

A retryable failure publishes the task again with attempt + 1 on the retry tier, so the record that failed is done and
holds up nobody behind it. When the attempts are used up, or another one would end the same way, the sample ends as
failed; it never gets a reward. Any other exception is a bug of the stage: it is logged with its trace and treated as
a failure of the infrastructure, so that one bad sample cannot stop a stage.
"""

from __future__ import annotations

import logging

import msgspec

from infra.errors import BusError, Failure
from infra.middleware import Call, Job, Middleware, Output, Result
from infra.middleware.terminal import terminal
from schemas.outcome import Boundary, FailureKind
from schemas.telemetry import EventKind
from schemas.topics import INIT_RETRY_5S, TRAJECTORIES

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Attempts of one sample, the first one included."""


def retry(max_attempts: int = MAX_ATTEMPTS) -> Middleware:
    """Turn failures of a call into records."""

    def around(call: Call) -> Call:
        async def caught(job: Job) -> Result:
            try:
                return await call(job)
            except Failure as failure:
                return failed(job, failure, max_attempts)
            except BusError:
                raise  # the log itself is away: nothing could be written about it
            except (Exception, SystemExit) as error:
                log.exception("%s: unexpected error on %s", job.stage, job.task.id)
                cause = f"{type(error).__name__}: {error}"
                bug = Failure(FailureKind.INFRASTRUCTURE, Boundary.STAGE, cause)
                return failed(job, bug, max_attempts)

        return caught

    return around


def failed(job: Job, failure: Failure, max_attempts: int) -> Result:
    """Return the end of one attempt: the next attempt, or a terminal trajectory."""
    task = job.task
    detail = f"{failure.kind.value} at {failure}"
    if failure.kind.retryable and task.attempt + 1 < max_attempts:
        again = msgspec.structs.replace(task, attempt=task.attempt + 1)
        return Result(EventKind.RETRIED, Output(INIT_RETRY_5S, again), detail=detail)
    trajectory = terminal(task, failure.outcome(), job.stage)
    return Result(EventKind.FAILED, Output(TRAJECTORIES, trajectory), detail=detail)
