"""A withdrawn sample ends at once as `cancelled`: skipped when it is taken up, stopped when it is in work.

Stopping cancels the asyncio task of the work: requests to an engine are closed, which ends their generations there, and
whoever waits for a thread waits no more. The thread itself cannot be stopped; what it still gives is dropped. A result
that was made in the same moment is dropped too: nothing of it is in the log yet. A cancellation by a stop or a
rebalance stays what it is. What the stage holds outside the log (RUN: an environment) is given up once the terminal
record is acknowledged; the reaper may have written one before, and the log decides.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from infra.cancellation import Cancellation
from infra.errors import CAUSE_CHARS
from infra.middleware import Call, Job, Middleware, Output, Result, Settle
from infra.terminal import terminal
from schemas.control import Cancel
from schemas.outcome import Cancelled
from schemas.telemetry import EventKind
from schemas.topics import TRAJECTORIES

Withdraw = Callable[[Any], Awaitable[None]]
"""Gives up what a stage holds for a message whose sample was withdrawn."""


def cancel(cancellation: Cancellation, withdraw: Withdraw | None = None) -> Middleware:
    """End samples that are withdrawn.

    Args:
        cancellation: what is withdrawn.
        withdraw: called with the job's message once its terminal record is acknowledged.
    """

    def around(call: Call) -> Call:
        async def withdrawable(job: Job) -> Result:
            result: Result | None = None
            with cancellation.watch(job.task.id) as watch:
                if watch.cancel is None:
                    result = await call(job)
            if watch.cancel is not None:
                settle = None if withdraw is None else functools.partial(withdraw, job.received.message)
                return cancelled(job, watch.cancel, settle)
            assert result is not None, "the block is left early for a withdrawal alone"
            return result

        return withdrawable

    return around


def cancelled(job: Job, cancel: Cancel, settle: Settle | None) -> Result:
    """Return the end of a sample that was withdrawn."""
    outcome = outcome_of(cancel)
    trajectory = terminal(job.task, outcome, job.stage)
    return Result(EventKind.CANCELLED, Output(TRAJECTORIES, trajectory), settle, outcome.cause)


def outcome_of(cancel: Cancel) -> Cancelled:
    """Return the outcome that a withdrawal gives, with what was withdrawn and by whom."""
    return Cancelled(cause=f"cancel of {cancel.target}: {cancel.cause}"[:CAUSE_CHARS])
