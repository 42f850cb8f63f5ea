"""Time as a seam: services ask a Clock, tests hand them one that jumps.

`now_ms` is the wall clock (for stamps and absolute deadlines), `monotonic` never runs backwards (for durations).
The virtual clock advances only when told to, and wakes sleepers in the order of their deadlines.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never run backwards."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after this many seconds."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return seconds that never run backwards."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after this many seconds."""
        await asyncio.sleep(seconds)


class VirtualClock:
    """A clock for tests: time stands still until `advance` moves it."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._start_ms = now_ms
        self._seconds = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_ms(self) -> int:
        """Return the virtual wall clock."""
        return self._start_ms + int(self._seconds * 1000)

    def monotonic(self) -> float:
        """Return the virtual seconds since the start."""
        return self._seconds

    async def sleep(self, seconds: float) -> None:
        """Return once the clock was advanced by this many seconds."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._seconds + seconds, next(self._order), woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Move time forward, waking sleepers on the way, each before later ones."""
        target = self._seconds + seconds
        while self._sleepers and self._sleepers[0][0] <= target:
            self._seconds, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
            await settle()
        self._seconds = target
        await settle()


async def wait_for(event: asyncio.Event, clock: Clock, seconds: float) -> bool:
    """Wait until the event is set or the time has passed on this clock; tell whether it is set."""
    waiting = {asyncio.ensure_future(event.wait()), asyncio.ensure_future(clock.sleep(seconds))}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return event.is_set()


async def settle(rounds: int = 20) -> None:
    """Let every task that can run go on until it waits for something."""
    for _ in range(rounds):
        await asyncio.sleep(0)
