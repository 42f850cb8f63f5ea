"""What a supervised service is, and what happens to it, as data.

A `Service` says how to start one program, when it counts as ready, what must be ready before, and what to do when it
ends. An `Event` says what happened to one of its instances. No process is touched here.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from rollmill.supervisor.logfile import LogFile
from rollmill.supervisor.process import Exit

READY_LIMIT_S = 60.0
"""Longest wait for a service to become ready, unless it says otherwise."""

STOP_GRACE_S = 10.0
"""Longest wait for a service to end by itself when asked, unless it says otherwise."""

BACKOFF_FIRST_S = 0.2
"""Pause before the first restart."""

BACKOFF_CAP_S = 15.0
"""Longest pause before a restart."""

HEALTHY_S = 30.0
"""A service that was ready for this long has recovered: its next death counts as the first."""


class Restart(StrEnum):
    """What to do when a service ends without being asked."""

    ALWAYS = "always"
    """Start it again."""
    ON_FAILURE = "on failure"
    """Start it again unless it ended with 0: it has work that can be finished."""
    NEVER = "never"
    """Leave it; a failure ends the supervisor."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """When a started service counts as ready."""

    what: str
    """What is waited for, for the error: `<service> was not ready: <what> did not happen`."""
    check: Callable[[LogFile | None], Awaitable[object]] | None
    """Returns once it is ready; None: it is ready when it has ended with 0 (a task that others build on)."""
    limit_s: float = READY_LIMIT_S
    """Longest wait."""
    why: Callable[[], str] = lambda: ""
    """What the last look found instead, for the error; empty where only the service itself can say."""

    @property
    def found(self) -> str:
        """The same in brackets, to stand behind what was waited for."""
        return f" ({why})" if (why := self.why()) else ""


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """How long to pause before a restart."""

    first_s: float = BACKOFF_FIRST_S
    """After the first death."""
    factor: float = 2.0
    """Growth from one death to the next."""
    cap_s: float = BACKOFF_CAP_S
    """Longest pause."""
    healthy_s: float = HEALTHY_S
    """Ready for this long: the count starts again."""

    def pause_s(self, deaths: int) -> float:
        """Return the pause after this many deaths in a row."""
        # The exponent is bounded: a service may die for days, and floats overflow.
        return min(self.cap_s, self.first_s * self.factor ** min(deaths - 1, 64))


@dataclass(frozen=True, kw_only=True)
class Service:
    """One program to keep running."""

    name: str
    """Unique; names its log."""
    argv: tuple[str, ...]
    """The program and its arguments."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's environment."""
    ready: Ready
    """When it counts as ready."""
    after: tuple[str, ...] = ()
    """Services that must be ready before it starts, and that end only after it has ended."""
    restart: Restart = Restart.ALWAYS
    """What to do when it ends without being asked."""
    give_up_after: int | None = None
    """Deaths in a row after which the supervisor gives up; None: it never does."""
    optional: bool = False
    """It may fail: nobody waits for it longer than for its first life, and it is started again like after any death."""
    stop_signal: int = signal.SIGTERM
    """Asks it to end."""
    stop_grace_s: float = STOP_GRACE_S
    """Longest wait after that signal before it is killed."""
    instances: int = 1
    """How many run at once."""


class What(StrEnum):
    """What happened to an instance."""

    STARTED = "started"
    """Its process runs for the first time."""
    RESTARTED = "restarted"
    """Its process runs again."""
    READY = "ready"
    """It does its work (a task: it is done)."""
    DIED = "died"
    """It ended without being asked."""
    ENDED = "ended"
    """It finished its work."""
    STOPPED = "stopped"
    """It ended because it was asked to."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to one instance of a service."""

    what: What
    """What it was."""
    service: str
    """Name of the service."""
    instance: int
    """Which of its instances, from 0."""
    label: str
    """What to call it: `run[1]`, or `broker` where there is only one."""
    pid: int
    """The process it happened to."""
    at_ms: int
    """When, by the wall clock."""
    took_s: float | None = None
    """READY: seconds since the start, after a death since that death."""
    exit: Exit | None = None
    """DIED, ENDED, STOPPED: how the process ended."""
    retry_in_s: float | None = None
    """DIED: pause before the next start; None if there is none."""
    tail: tuple[str, ...] = ()
    """DIED: the last lines it wrote."""

    def __str__(self) -> str:
        details = [f"pid {self.pid}"]
        if self.exit is not None:
            details.append(str(self.exit))
        if self.took_s is not None:
            details.append(f"{self.took_s:.1f} s")
        if self.retry_in_s is not None:
            details.append(f"next start in {self.retry_in_s:.1f} s")
        return f"{self.label} {self.what} ({', '.join(details)})"

    @property
    def last_words(self) -> str:
        """The last line that it wrote before it died; empty if there is none."""
        return next((line.strip() for line in reversed(self.tail) if line.strip()), "")


def with_tail(message: str, log: Path, tail: tuple[str, ...]) -> str:
    """Return an error text that shows the end of a log."""
    if not tail:
        return f"{message}; it wrote nothing to {log}"
    return f"{message}; the end of {log}:\n" + "\n".join(f"  {line}" for line in tail)
