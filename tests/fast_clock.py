"""A clock that runs faster than the machine's, for tests of services that wait for seconds."""

from __future__ import annotations

import asyncio
import time


class FastClock:
    """Real time, with seconds that pass `factor` times as fast: a retry after 5 s comes after 5 s / factor."""

    def __init__(self, factor: float = 25.0) -> None:
        self._factor = factor
        self._began_s = time.monotonic()
        self._began_ms = time.time_ns() // 1_000_000

    def now_ms(self) -> int:
        """Return the wall clock of this clock's world."""
        return self._began_ms + int(self.monotonic() * 1000)

    def monotonic(self) -> float:
        """Return the seconds since the start."""
        return (time.monotonic() - self._began_s) * self._factor

    async def sleep(self, seconds: float) -> None:
        """Return after this many of its seconds."""
        await asyncio.sleep(seconds / self._factor)
