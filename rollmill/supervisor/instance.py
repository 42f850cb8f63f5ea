"""One instance of a service and its lives, one after another.

    start -> ready -> (died -> pause -> start again -> ready)* -> ended | stopped | failed for good

Promises: at most one process at a time; whatever way `live` is left, also by cancellation, its process is gone. A
first life that ends or is late before it was ready is an error at once: something is wrong that a restart does not
mend. Only where somebody else killed it (a person, the system that had no memory left) is it started again, a few
times. A later life is restarted, since what it needs may be restarting too; so is the first one of a service that is
optional. It does not know the other services.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import textwrap
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from infra.clock import Clock
from rollmill.supervisor.errors import CrashLoop, NotReady, ServiceDied
from rollmill.supervisor.logfile import LogFile
from rollmill.supervisor.process import Exit, Process
from rollmill.supervisor.service import Backoff, Event, Restart, Service, What, with_tail

KILLED_STARTS = 3
"""So many first lives may be killed before they were ready until that is an error."""


class Instance:
    """An instance of a service; `live` runs it."""

    def __init__(
        self,
        service: Service,
        index: int,
        *,
        log: LogFile,
        cwd: Path,
        clock: Clock,
        backoff: Backoff,
        on_event: Callable[[Event], None],
    ) -> None:
        self.service = service
        self.index = index
        self.log = log
        self.process: Process | None = None
        """The process of the last life; None before the first."""
        self.last: Event | None = None
        """What happened to it last."""
        self.died: Event | None = None
        """Its last death."""
        self.lives = 0
        self.started_ms = 0
        self._cwd = cwd
        self._clock = clock
        self._backoff = backoff
        self._on_event = on_event
        self._stop = asyncio.Event()
        self._killed = False
        self._changed = asyncio.Event()
        self._was_ready = False

    def __str__(self) -> str:
        return self.service.name if self.service.instances == 1 else f"{self.service.name}[{self.index}]"

    async def live(self) -> Exit:
        """Run it until it has finished or was stopped; return how its last process ended.

        Raises:
            ServiceDied: it ended before it was ever ready, or failed and is not to be restarted.
            NotReady: it was not ready in time in its first life.
            CrashLoop: it died too often in a row.
        """
        deaths = 0
        down_since: float | None = None
        while True:
            process = await self._start()
            try:
                ended, ready_at = await self._one_life(process, down_since)
            finally:
                process.abandon()
            if self._stop.is_set():
                self._emit(What.STOPPED, exit_=ended)
                return ended
            if self._finished(ended):
                self._emit(What.ENDED, exit_=ended)
                return ended
            down_since = self._clock.monotonic()
            healthy = ready_at is not None and down_since - ready_at >= self._backoff.healthy_s
            deaths = 1 if healthy else deaths + 1
            if not await self._pause(ended, deaths):
                return ended

    def stop(self) -> None:
        """Ask for the end; `live` returns once the process is gone."""
        self._stop.set()

    def kill(self) -> None:
        """Kill its process and all that it started, now; `live` returns, and a start under way gets no grace."""
        self._killed = True
        self._stop.set()
        if self.process is not None:
            self.process.kill_group()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once something happened that makes the condition true."""
        while not condition():
            await self._changed.wait()

    @property
    def was_ready(self) -> bool:
        """Whether it has ever been ready."""
        return self._was_ready

    @property
    def given_up_on(self) -> bool:
        """Whether nobody waits for it any more: it is optional, and its first life ended before it was ready."""
        return self.service.optional and self.died is not None

    @property
    def is_ready(self) -> bool:
        """Whether it is ready now."""
        return self.last is not None and self.last.what is What.READY

    async def _start(self) -> Process:
        self.lives += 1
        self.started_ms = self._clock.now_ms()
        command = shlex.join(self.service.argv).replace("\n", "\\n")
        self.log.begin(f"{self} life {self.lives}: {textwrap.shorten(command, 500)}")
        env = {**self.service.env, "ROLLMILL_SERVICE": self.service.name, "ROLLMILL_INSTANCE": str(self.index)}
        try:
            self.process = await Process.start(self.service.argv, env=env, cwd=self._cwd, log=self.log)
        except OSError as error:
            raise ServiceDied(f"{self} could not be started in {self._cwd}: {error}") from error
        self._emit(What.STARTED if self.lives == 1 else What.RESTARTED)
        return self.process

    async def _one_life(self, process: Process, down_since: float | None) -> tuple[Exit, float | None]:
        """Return how the life ended, and when it became ready if it did."""
        begun = self._clock.monotonic() if down_since is None else down_since
        first = await self._until_ready(process)
        if first == "ready":
            ready_at = self._clock.monotonic()
            self._mark_ready(ready_at - begun)
            await race({"ended": process.wait(), "stop": self._stop.wait()})
            return await self._end(process), ready_at
        ended = await self._end(process)
        if first == "stop":
            return ended, None
        if self.service.ready.check is None and ended.code == 0:
            self._mark_ready(self._clock.monotonic() - begun)
        elif self._must_have_begun(ended, late=first == "late"):
            raise self._bad_start(late=first == "late", ended=ended)
        return ended, None

    def _must_have_begun(self, ended: Exit, *, late: bool) -> bool:
        """Tell whether a life that was never ready is an error, and none that another life would mend."""
        if self._was_ready or self.service.optional:
            return False
        return ended.code != -signal.SIGKILL or late or self.lives >= KILLED_STARTS

    async def _until_ready(self, process: Process) -> str:
        waits: dict[str, Awaitable[object]] = {"stop": self._stop.wait()}
        if self.service.ready.check is not None:
            waits["ready"] = self.service.ready.check(self.log)
        return await race(
            {**waits, "ended": process.wait(), "late": self._clock.sleep(self.service.ready.limit_s)},
        )

    async def _end(self, process: Process) -> Exit:
        grace_s = 0 if self._killed else self.service.stop_grace_s
        return await process.stop(self.service.stop_signal, grace_s=grace_s)

    def _finished(self, ended: Exit) -> bool:
        return ended.code == 0 and self.service.restart is not Restart.ALWAYS

    async def _pause(self, ended: Exit, deaths: int) -> bool:
        """Wait before the next life; False when it was stopped meanwhile.

        Raises:
            ServiceDied: it is not to be restarted.
            CrashLoop: it died too often.
        """
        limit = self.service.give_up_after
        if self.service.restart is Restart.NEVER:
            self._emit(What.DIED, exit_=ended)
            raise ServiceDied(with_tail(f"{self} failed ({ended})", self.log.path, self.log.tail()))
        if limit is not None and deaths >= limit:
            self._emit(What.DIED, exit_=ended)
            message = f"{self} died {deaths} times in a row (last: {ended})"
            raise CrashLoop(with_tail(message, self.log.path, self.log.tail()))
        pause_s = self._backoff.pause_s(deaths)
        self._emit(What.DIED, exit_=ended, retry_in_s=pause_s)
        return await race({"stop": self._stop.wait(), "pause": self._clock.sleep(pause_s)}) == "pause"

    def _bad_start(self, *, late: bool, ended: Exit) -> Exception:
        ready = self.service.ready
        self._emit(What.DIED, exit_=ended)
        if late:
            message = f"{self} was not ready: {ready.what} did not happen in {ready.limit_s:.0f} s{ready.found}"
            return NotReady(with_tail(message, self.log.path, self.log.tail()))
        message = f"{self} ended ({ended}) before it was ready; {ready.what} was waited for"
        return ServiceDied(with_tail(message, self.log.path, self.log.tail()))

    def _mark_ready(self, took_s: float) -> None:
        self._was_ready = True
        self._emit(What.READY, took_s=took_s)

    def _emit(
        self,
        what: What,
        *,
        took_s: float | None = None,
        exit_: Exit | None = None,
        retry_in_s: float | None = None,
    ) -> None:
        assert self.process is not None, "nothing happens before the first start"
        self.last = Event(
            what=what,
            service=self.service.name,
            instance=self.index,
            label=str(self),
            pid=self.process.pid,
            at_ms=self._clock.now_ms(),
            took_s=took_s,
            exit=exit_,
            retry_in_s=retry_in_s,
            tail=self.log.tail() if what is What.DIED else (),
        )
        if what is What.DIED:
            self.died = self.last
        # A new event for each change, so that nobody who waits misses one or wakes for an old one.
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_event(self.last)


async def race(waits: Mapping[str, Awaitable[object]]) -> str:
    """Return the name of the wait that ended first (of several, the one named first), and end the others.

    What the winner raises is raised here.
    """
    tasks = {name: asyncio.ensure_future(wait) for name, wait in waits.items()}
    try:
        done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    winner = next(name for name, task in tasks.items() if task in done)
    tasks[winner].result()
    return winner
