"""Time: a task is not started after `start_by_ms`, and each stage has a budget that counts only inside it.

Both end the sample as `expired`: they are limits on the system and say nothing about the policy. A budget stands still
while the stage can do nothing because a service is away; how long, and that this has a limit, is `infra/guard.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from infra.clock import Clock
from infra.middleware import Call, Job, Middleware, Output, Result
from infra.shared_timer import SharedTimer, never_still
from infra.terminal import terminal
from schemas.messages import Task
from schemas.outcome import Expired
from schemas.telemetry import EventKind
from schemas.topics import TRAJECTORIES

GRACE_S = 30.0
"""Added to a sample's own limits before it is given up, seconds: covers retries in flight and clocks that differ."""

LONGEST_S = 7 * 86_400.0
"""No sample is waited for longer than this after its start limit, seconds: its task leaves the log then."""


def start_by(clock: Clock) -> Middleware:
    """Expire a task that would be started too late, at any attempt."""

    def around(call: Call) -> Call:
        async def checked(job: Job) -> Result:
            late_ms = clock.now_ms() - job.task.start_by_ms
            if late_ms > 0:
                return expired(job, f"not started by its deadline: {late_ms} ms late in {job.stage}")
            return await call(job)

        return checked

    return around


def budget(stage: str, still_s: Callable[[], float] = never_still) -> Middleware:
    """Expire a sample that stays in a stage for longer than its budget.

    Args:
        stage: whose budget.
        still_s: for how long all budgets stood still so far, seconds; only grows.
    """
    timer = SharedTimer(still_s)

    def around(call: Call) -> Call:
        async def limited(job: Job) -> Result:
            seconds = budget_s(job.task, stage)
            limit = timer.limit(seconds)
            try:
                with limit:
                    return await call(job)
            except TimeoutError:
                if not limit.expired:
                    raise
                return expired(job, f"{stage} took longer than its budget of {seconds:g} s")

        return limited

    return around


def expired(job: Job, cause: str) -> Result:
    """Return the end of a sample whose time ran out."""
    trajectory = terminal(job.task, Expired(cause=cause), job.stage)
    return Result(EventKind.EXPIRED, Output(TRAJECTORIES, trajectory), detail=cause)


def reap_at_ms(task: Task) -> int:
    """Return when a sample without an outcome is given up, milliseconds since the epoch.

    The one clock of the reaper and of lease times: the start limit, all stage budgets and a grace.
    """
    seconds = task.budgets.total_s + GRACE_S
    # A foreign producer may write any float; an endless budget, or none at all, must not stop the reaper.
    return task.start_by_ms + int((seconds if 0 <= seconds <= LONGEST_S else LONGEST_S) * 1000)


def budget_s(task: Task, stage: str) -> float:
    """Return how long a task may stay in a stage, seconds."""
    budgets = {"init": task.budgets.init_s, "run": task.budgets.run_s, "eval": task.budgets.eval_s}
    return budgets[stage]
