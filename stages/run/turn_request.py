"""What RUN asks the engines for a turn of a sample, whoever makes the turns: the stage itself or an agent that calls.

The names are the sample's own, so that the turns of an episode stay at one engine, and siblings near each other. No
I/O; which engine is asked, the pool decides.
"""

from __future__ import annotations

from infra.inference.base import Need
from infra.inference.pool import Request
from schemas.messages import Task
from stages.run.render import Renderer


def request_of(task: Task, renderer: Renderer, *, turn: int, seed: int, max_tokens: int) -> Request:
    """Return the request of a turn.

    Args:
        task: the sample.
        renderer: of the engines' model; its stop ids end an answer.
        turn: its number in the episode, from 0.
        seed: decides the draw.
        max_tokens: most tokens of the answer.
    """
    name = f"{task.run}/{task.group}/{task.sample}/{task.attempt}"
    return Request(
        sampling=task.sampling,
        seed=seed,
        request_id=f"{name}/{turn}",
        stop_token_ids=renderer.stop_ids,
        max_tokens=max_tokens,
        episode=name,
        group=f"{task.run}/{task.group}",
    )


def need_of(task: Task) -> Need:
    """Return which weights may sample a task."""
    return Need(task.min_version, task.weights_of)
