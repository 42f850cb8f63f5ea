"""Where each stage sits between the topics: the one place that says so, for processes and for the pipeline alike.

    TASKS -init-> EPISODES -run-> ROLLOUTS -eval-> TRAJECTORIES

A handler wired to a topic that carries another type is a type error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from infra.middleware.retry import grade_again
from infra.stage import Done, Stage
from schemas.messages import Episode, Rollout, Task, Trajectory
from schemas.topics import (
    EPISODES,
    EVAL_RETRY_5M,
    EVAL_RETRY_5S,
    EVAL_RETRY_30S,
    INIT_RETRY_5M,
    INIT_RETRY_5S,
    INIT_RETRY_30S,
    ROLLOUTS,
    TASKS,
    TRAJECTORIES,
)


def init_stage(handle: Callable[[Task], Awaitable[Done[Episode] | None]]) -> Stage[Task, Episode]:
    """Return INIT around its handler; it also takes the tasks of another attempt."""
    return Stage(
        name="init",
        sources=(TASKS, INIT_RETRY_5S, INIT_RETRY_30S, INIT_RETRY_5M),
        sink=EPISODES,
        handle=handle,
    )


def run_stage(
    handle: Callable[[Episode], Awaitable[Done[Rollout] | None]],
    withdraw: Callable[[Episode], Awaitable[None]] | None = None,
) -> Stage[Episode, Rollout]:
    """Return RUN around its handler; `withdraw` closes the environment of a cancelled sample."""
    return Stage(name="run", sources=(EPISODES,), sink=ROLLOUTS, handle=handle, withdraw=withdraw)


def eval_stage(handle: Callable[[Rollout], Awaitable[Done[Trajectory] | None]]) -> Stage[Rollout, Trajectory]:
    """Return EVAL around its handler; it also takes the rollouts that are graded again."""
    return Stage(
        name="eval",
        sources=(ROLLOUTS, EVAL_RETRY_5S, EVAL_RETRY_30S, EVAL_RETRY_5M),
        sink=TRAJECTORIES,
        handle=handle,
        repeat=grade_again,
    )
