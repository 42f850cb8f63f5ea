"""An event loop in which time jumps: when nothing can run, the next timer is due at once.

Hours of waiting take no time, and the order of everything is a function of the program alone: timers by their time,
callbacks as they were scheduled, tasks in a set by their birth. Threads would bring luck back in, so what asks for one
(`asyncio.to_thread`) runs at once, in place. For programs without real input and output; a loop that waits for
something that no timer brings about says so instead of hanging.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

LEAST_S = 1e-6
"""The shortest sleep, seconds: the loop takes timers for due that are less than 1e-9 s away, and moves no time then."""

EPOCH_MS = 1_700_000_000_000
"""The wall clock when a loop begins, milliseconds since the epoch."""


class _Jumping(selectors.SelectSelector):
    """Moves the time instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everything waits, and no timer will end it: a deadlock")
        if not ready and timeout is not None and timeout > 0:
            self.now += timeout
        return ready


def _by_birth(one: Any) -> int:
    """Hash by order of birth: asyncio keeps sets of these, and would go through them by their addresses."""
    if not hasattr(one, "number"):
        one.number = next(VirtualTimeLoop.births)
    number: int = one.number
    return number


class _Task(asyncio.Task[Any]):
    __hash__ = _by_birth


class _Future(asyncio.Future[Any]):
    __hash__ = _by_birth


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop; one at a time."""

    births = itertools.count()

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        VirtualTimeLoop.births = itertools.count()
        self.set_default_executor(InPlace())
        self.set_task_factory(lambda loop, work, **named: _Task(work, loop=loop, **named))

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return _Future(loop=self)

    def time(self) -> float:
        """Return the virtual seconds since the beginning."""
        return self._jumping.now


class InPlace(ThreadPoolExecutor):
    """Does at once what it is given; a pool of threads by type alone, since a loop takes nothing else."""

    def submit(self, work: Callable[..., T], /, *arguments: Any, **settings: Any) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(work(*arguments, **settings))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            done.set_exception(error)
        return done


class LoopClock:
    """The clock of whatever loop runs (`infra.clock.Clock`)."""

    def now_ms(self) -> int:
        """Return the virtual wall clock."""
        return EPOCH_MS + int(self.monotonic() * 1000)

    def monotonic(self) -> float:
        """Return the virtual seconds."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Return after so many virtual seconds, or after LEAST_S: who waits for a rounding error must get on."""
        await asyncio.sleep(max(seconds, LEAST_S) if seconds > 0 else 0)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
