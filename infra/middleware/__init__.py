"""One concern per file around a stage's handler: a middleware takes a call and gives a call.

    isolation( events( cancel( start_by( retry( budget( handle ))))))        start_by and budget: `deadline.py`

A `Job` is one record with its message; a `Result` is what must be in the log before the record is done. Handlers
return an output or raise `infra.errors.Failure`; only `retry.py` turns a Failure into a record. No middleware knows a
stage.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import reduce
from typing import Any, Generic, TypeVar

import msgspec

from infra.dead_letter import Death
from infra.offset_map import MAX_STARTS
from infra.offsets import NEVER, Start
from infra.wire import Packed, Received
from schemas.message import Message
from schemas.messages import Episode, Rollout, Task
from schemas.telemetry import EventKind
from schemas.topics import Topic

M = TypeVar("M", bound=Message)

Settle = Callable[[], Awaitable[None]]
"""Called once the output is acknowledged and before the input is committed."""


class Output(msgspec.Struct, Generic[M], frozen=True):
    """One message for one topic that carries its type."""

    topic: Topic[M]
    message: M
    packed: Packed | None = None
    """The message's bytes, when they were made already."""


class Result(msgspec.Struct, frozen=True):
    """The end of one job: what must be in the log before its record is done."""

    kind: EventKind
    """How it ended."""
    output: Output[Any] | None = None
    """What is published; None where another worker published already."""
    settle: Settle | None = None
    """What follows the acknowledgement."""
    detail: str = ""
    """Cause, for an end that is not a success."""
    death: Death | None = None
    """The job's record goes to `dead`, after the output is acknowledged and before what settles it."""
    first_failed_ms: int | None = None
    """When an attempt of this work failed first, milliseconds since the epoch; travels with the output."""


def _not_counted() -> Start:
    """Where nobody counts deaths the first one decides."""
    return Start(MAX_STARTS)


class Job(msgspec.Struct, frozen=True):
    """One record in work."""

    stage: str
    """The stage that works on it."""
    received: Received[Any]
    """The record and its message."""
    start: Start = NEVER
    """How often it was started before without an end."""
    died: Callable[[], Start] = _not_counted
    """Counts that it killed a process that ran nothing else."""

    @property
    def task(self) -> Task:
        """The task that the message is or embeds."""
        message = self.received.message
        if isinstance(message, Task):
            return message
        if isinstance(message, Episode | Rollout):
            return message.task
        raise TypeError(f"{type(message).__name__} has no task: stages work on tasks, episodes and rollouts")


Call = Callable[[Job], Awaitable[Result]]
Middleware = Callable[[Call], Call]


def compose(call: Call, *around: Middleware) -> Call:
    """Wrap a call; the first middleware is the outermost."""
    return reduce(lambda inner, outer: outer(inner), reversed(around), call)
