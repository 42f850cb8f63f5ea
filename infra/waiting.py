"""What a job waits for, said by whoever waits, however deep below the stage: a policy version, a place on a host.

    waits_for("policy version >= 3")    # ... and when the wait is over: waits_for("")

A listener belongs to a job (`heard_by`, in `middleware/events.py`) and is found through the task's context, so that
clients need not carry the job through every call. Where nobody listens nothing happens; saying never waits or fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass

from infra.clock import Clock

SAY_AFTER_S = 1.0
"""A wait shorter than this is nobody's business, seconds."""

Listener = Callable[[str], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def waits_for(what: str) -> None:
    """Say what the job of this task waits for; empty once it no longer does. Saying the same again is free."""
    listener = _listener.get()
    if listener is not None:
        listener(what)


class _Heard:
    """A block with a listener; a class, since a generator per job costs more than the rest of it."""

    __slots__ = ("_listener", "_token")

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._token: Token[Listener | None]

    def __enter__(self) -> None:
        self._token = _listener.set(self._listener)

    def __exit__(self, *_: object) -> None:
        _listener.reset(self._token)


def heard_by(listener: Listener) -> AbstractContextManager[None]:
    """Give the block, and the tasks that it starts, a listener."""
    return _Heard(listener)


@dataclass
class Wait:
    """A wait that lasts as long as its block."""

    what: str
    """What is waited for; may change while it lasts."""


@asynccontextmanager
async def waiting(clock: Clock, what: str) -> AsyncIterator[Wait]:
    """Say what the block waits for once it has lasted SAY_AFTER_S, and at its end that it no longer does.

    For calls that answer late because the other side lets them wait: nothing in between could say so.
    """
    wait = Wait(what)
    saying = asyncio.create_task(_say(clock, wait)) if _listener.get() is not None else None
    try:
        yield wait
    finally:
        if saying is not None:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)
            waits_for("")


async def _say(clock: Clock, wait: Wait) -> None:
    while True:
        await clock.sleep(SAY_AFTER_S)
        waits_for(wait.what)
