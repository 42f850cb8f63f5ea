"""When a service is away, and for how long: a circuit breaker, decided without I/O.

             failures in a row              pause over              the probe failed
    closed -------------------------> open ------------> half open -----------------> open (a longer pause)
       ^                                                     |
       +-----------------------------------------------------+ the probe succeeded

Invariants: it opens only after `failures` calls in a row failed over at least `failing_s`, without one success between
them; half open lets one probe through at a time; only a probe closes it, since a call that began before it opened may
still end well. The open time only grows, by at most `longest_s` in one outage, which begins with the first call of the
row that failed.

Only failures in a row count, no share of failures: a service that answers every other call is slow and not away, and to
pause whoever asks again would make it slower still. Time is handed in as monotonic seconds. The breaker knows no
service, no clock and no log.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """When a breaker opens and how it looks for the service again."""

    failures: int = 3
    """It opens after so many calls that failed in a row ..."""
    failing_s: float = 2.0
    """... over at least this many seconds: calls that fail at the same moment say no more than one of them."""
    first_pause_s: float = 1.0
    """Before the first probe, seconds; doubled with each probe that fails."""
    longest_pause_s: float = 5.0
    """Longest pause between two probes, seconds."""
    longest_s: float = 1800.0
    """Most open time that one outage adds, seconds: what waits longer spends its own time again."""


class State(StrEnum):
    """What calls may do."""

    CLOSED = "closed"
    """Go through."""
    OPEN = "open"
    """Wait."""
    HALF_OPEN = "half_open"
    """Wait for the end of one probe."""


class CircuitBreaker:
    """What the calls to one service say about it."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.limits = limits or BreakerLimits()
        self._state = State.CLOSED
        self._failures = 0
        self._since = 0.0
        """The first failure of the row, monotonic seconds."""
        self._pause_s = self.limits.first_pause_s
        self._probe_at = 0.0
        self._past_s = 0.0
        """Open time of the outages that are over."""

    @property
    def state(self) -> State:
        """What calls may do."""
        return self._state

    @property
    def since(self) -> float:
        """When the present outage began, monotonic seconds; of no meaning while the breaker is closed."""
        return self._since

    @property
    def probe_at(self) -> float:
        """When an open breaker lets a probe through, monotonic seconds."""
        return self._probe_at

    def open_s(self, now: float) -> float:
        """Return the open time of all outages so far, seconds."""
        return self._past_s + self.outage_s(now)

    def outage_s(self, now: float) -> float:
        """Return the open time of the present outage, seconds."""
        return 0.0 if self._state is State.CLOSED else min(now - self._since, self.limits.longest_s)

    def succeeded(self) -> None:
        """Take the answer of a call."""
        if self._state is State.CLOSED:
            self._failures = 0

    def failed(self, now: float) -> None:
        """Take a call that reached nobody."""
        if self._state is not State.CLOSED:
            return
        if self._failures == 0:
            self._since = now
        self._failures += 1
        if self._failures >= self.limits.failures and now - self._since >= self.limits.failing_s:
            self._open(now, self.limits.first_pause_s)

    def probe(self, now: float) -> bool:
        """Tell whether the caller is to make the probe; it must say how that ended."""
        if self._state is not State.OPEN or now < self._probe_at:
            return False
        self._state = State.HALF_OPEN
        return True

    def probed(self, now: float, *, well: bool) -> None:
        """Take the end of the probe."""
        if self._state is not State.HALF_OPEN:
            return
        if not well:
            self._open(now, min(2 * self._pause_s, self.limits.longest_pause_s))
            return
        self._past_s = self.open_s(now)
        self._state, self._failures = State.CLOSED, 0

    def _open(self, now: float, pause_s: float) -> None:
        self._state, self._pause_s, self._probe_at = State.OPEN, pause_s, now + pause_s
