"""Where each stage sits between the topics: the one place that says so, for processes and for the pipeline alike.

    TASKS -init-> EPISODES -run-> ROLLOUTS -eval-> TRAJECTORIES

A handler wired to a topic that carries another type is a type error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from infra.stage import Done, Stage
from schemas.messages import Episode, Rollout, Task, Trajectory
from schemas.topics import EPISODES, INIT_RETRY_5S, ROLLOUTS, TASKS, TRAJECTORIES


def init_stage(handle: Callable[[Task], Awaitable[Done[Episode] | None]]) -> Stage[Task, Episode]:
    """Return INIT around its handler; it also takes the tasks of another attempt."""
    return Stage(name="init", sources=(TASKS, INIT_RETRY_5S), sink=EPISODES, handle=handle)


def run_stage(handle: Callable[[Episode], Awaitable[Done[Rollout] | None]]) -> Stage[Episode, Rollout]:
    """Return RUN around its handler."""
    return Stage(name="run", sources=(EPISODES,), sink=ROLLOUTS, handle=handle)


def eval_stage(handle: Callable[[Rollout], Awaitable[Done[Trajectory] | None]]) -> Stage[Rollout, Trajectory]:
    """Return EVAL around its handler."""
    return Stage(name="eval", sources=(ROLLOUTS,), sink=TRAJECTORIES, handle=handle)
