"""The terminal record of a sample that has no rollout: what the retries, the deadlines and the reaper write.

It must fit into the log, or the sample would never end and its writer would stumble over it again and again: a task
too large to be carried once more loses its payload. The digest, by which the arbiter knows the task, stays.
"""

from __future__ import annotations

import logging

import msgspec

from schemas import codec
from schemas.messages import Task, Trajectory
from schemas.outcome import Outcome

log = logging.getLogger(__name__)

TASK_BYTES = 768 * 1024
"""Largest task that a terminal record carries whole, uncompressed."""


def terminal(task: Task, outcome: Outcome, stage: str) -> Trajectory:
    """Return how a sample ended without a rollout, as this stage or service says."""
    size = len(codec.encode(task))
    if size > TASK_BYTES:
        log.warning("%s: a task of %d bytes; its terminal record leaves the payload out", task.id, size)
        task = msgspec.structs.replace(task, payload={"left_out_bytes": size})
    return Trajectory(task=task, outcome=outcome, stage=stage)
