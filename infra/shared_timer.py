"""A limit on the time that a block may take, for thousands of short blocks a second: one timer for all of them.

    with timer.limit(30.0):          as `asyncio.timeout(30.0)`: TimeoutError, and any other cancellation passes

`asyncio.timeout` asks the loop for a timer per block and cancels it again, which costs as much as encoding a message.
Almost no block ever runs into its limit, so here the loop is asked once per time that a limit lasts: the timer stands
at the first limit that was set, and looks at all others when it goes off. Time may stand still (`still_s`): a limit
does not count it. It does not know what is limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

LOOK_S = 0.1
"""Between two looks at the limits at least, seconds: where time stands still, what is nearly used up stays so."""


def never_still() -> float:
    """Tell that time never stood still."""
    return 0.0


class SharedTimer:
    """The limits of one event loop that share a timer."""

    def __init__(self, still_s: Callable[[], float] = never_still) -> None:
        """Begin without limits.

        Args:
            still_s: for how long time stood still so far, seconds; only grows.
        """
        self._still_s = still_s
        self._limits: set[Limit] = set()
        self._handle: asyncio.TimerHandle | None = None
        self._goes_off = 0.0

    def limit(self, seconds: float) -> Limit:
        """Return a block that may take so many seconds."""
        return Limit(self, seconds)

    def add(self, limit: Limit) -> None:
        """Look after a limit from now on."""
        loop = asyncio.get_running_loop()
        now = loop.time() - self._still_s()
        limit.due = now + limit.seconds
        self._limits.add(limit)
        if self._handle is None or limit.due < self._goes_off:
            self._set(loop, now, limit.due)

    def remove(self, limit: Limit) -> None:
        """Forget a limit; the timer stays as it is."""
        self._limits.discard(limit)

    def _set(self, loop: asyncio.AbstractEventLoop, now: float, goes_off: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._goes_off = goes_off
        self._handle = loop.call_later(goes_off - now, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._handle, now = None, loop.time() - self._still_s()
        for limit in [limit for limit in self._limits if limit.due <= now]:
            self._limits.discard(limit)
            limit.fire()
        if self._limits:
            self._set(loop, now, max(now + LOOK_S, min(limit.due for limit in self._limits)))


class Limit:
    """Cancels the asyncio task that entered it once its time is used up; the block then ends with TimeoutError.

    Attributes:
        seconds: how long the block may take.
        due: when its time is used up, on the timer's clock; set on entry.
        expired: it ran out, so a TimeoutError out of the block may be its own.
    """

    __slots__ = ("_before", "_task", "_timer", "due", "expired", "seconds")

    def __init__(self, timer: SharedTimer, seconds: float) -> None:
        self.seconds = seconds
        self.due = 0.0
        self.expired = False
        self._timer = timer
        self._task: asyncio.Task[object]
        self._before = 0

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "entered by a task"
        self._task, self._before = task, task.cancelling()
        self._timer.add(self)
        return self

    def fire(self) -> None:
        """End the block."""
        self.expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.remove(self)
        # As `asyncio.timeout` does it: a stop or a rebalance that cancels the task as well keeps its say.
        if self.expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error
