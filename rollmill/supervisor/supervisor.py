"""The supervisor: starts services in order, keeps them running, ends them in reverse order.

    async with Supervisor(services, run_dir=...) as supervisor:   # takes the lock; `AlreadyRunning` if it is held
        await supervisor.start()                                  # returns when all are ready
        await supervisor.wait()                                   # raises when one fails for good
                                                                  # on leaving: all ended, lock given back

Invariants: a service starts when all that it is `after` are ready, and ends before any of them does; independent ones
start and end side by side. Every wait has a limit, and its error shows the end of the log. Nothing outlives the
supervisor (`infra/leash.py`). A disk that is full ends it no more than the services: what it writes is for people, and
is written again once there is room. It does not know what the services are (`rollmill/services.py` does).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import TracebackType
from typing import Self

from infra.broker.pidfile import identity_of
from infra.clock import Clock, SystemClock
from infra.disk import NoSpace
from infra.errors import ConfigError
from rollmill.supervisor.errors import NotBack, SupervisorError
from rollmill.supervisor.instance import Instance, race
from rollmill.supervisor.logfile import LogFile
from rollmill.supervisor.process import Exit
from rollmill.supervisor.runfile import InstanceState, RunFile, State
from rollmill.supervisor.service import Backoff, Event, Restart, Service, What

log = logging.getLogger(__name__)

RECOVERY_LIMIT_S = 240.0
"""Longest wait for a killed instance to be ready again, unless the caller says otherwise."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a supervisor to stop in order; the second one kills."""


class Supervisor:
    """The local services of one directory."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        run_dir: Path,
        addresses: Mapping[str, str] | None = None,
        on_event: Callable[[Event], None] | None = None,
        clock: Clock | None = None,
        backoff: Backoff | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Check the services; nothing is started or written yet.

        Args:
            services: what may be started, in any order.
            run_dir: holds the lock, the state file and `logs/`; made when missing.
            addresses: where the services are reached; told in the state file.
            on_event: called in the event loop at whatever happens to a service.
            clock: for pauses and limits.
            backoff: how long to pause before restarts.
            cwd: directory to start the services in; by default the current one.

        Raises:
            ConfigError: a name twice, an unknown name in `after`, or a circle.
        """
        self._services = _checked(services)
        self._run_dir = run_dir
        self._addresses = dict(addresses or {})
        self._observer = on_event
        self._clock = clock or SystemClock()
        self._backoff = backoff or Backoff()
        self._cwd = cwd or Path.cwd()
        self._runfile: RunFile | None = None
        self._started_ms = 0
        self._full = False
        """The disk had no room for the state file the last time."""
        self._bringing: dict[str, asyncio.Task[None]] = {}
        self._instances: dict[str, list[Instance]] = {}
        self._lives: dict[Instance, asyncio.Task[Exit]] = {}

    async def __aenter__(self) -> Self:
        """Take the directory.

        Raises:
            AlreadyRunning: another supervisor has it.
        """
        self._runfile = RunFile(self._run_dir)
        self._started_ms = self._clock.now_ms()
        self._write_state()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every service and give the directory back."""
        assert self._runfile is not None, "left before it was entered"
        try:
            await self.stop()
        finally:
            for task in self._lives.values():
                task.cancel()
            self.kill_all()
            self._runfile.release()

    async def start(self, *names: str) -> None:
        """Start these services (by default all) and what they need, and return when all of them are ready.

        An optional one that died before it was ready is waited for no longer; `unwell` names it.

        May be called again for others, also while an earlier call is still waiting.

        Raises:
            ServiceDied: one ended before it was ready.
            NotReady: one was not ready in time.
        """
        await asyncio.gather(*(self._bring(name) for name in names or self._services))

    async def wait(self) -> None:
        """Return when all services started so far have ended by themselves or were stopped.

        Raises:
            ServiceDied: one failed that is not to be restarted.
            CrashLoop: one died too often in a row.
        """
        if self._lives:
            done, _ = await asyncio.wait(self._lives.values(), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()

    async def stop(self) -> None:
        """End every service, each before those that it needs; by force where its grace runs out."""
        for task in self._bringing.values():
            task.cancel()
        await asyncio.gather(*self._bringing.values(), return_exceptions=True)
        ended = {name: asyncio.Event() for name in self._instances}
        async with asyncio.TaskGroup() as group:
            for name in self._instances:
                group.create_task(self._stop_service(name, ended))

    def kill_all(self) -> None:
        """Kill everything now, in no order; nothing is started again."""
        for instance in self._lives:
            instance.kill()

    def kill(self, name: str, instance: int = 0, number: int = signal.SIGKILL) -> int:
        """Send a signal to one process and return its pid; what follows is as if somebody else had sent it.

        Raises:
            SupervisorError: that instance does not run at the moment.
        """
        one = self._instance(name, instance)
        if one.process is None or not one.process.signal(number):
            raise SupervisorError(f"{one} does not run, so it cannot be sent signal {number}")
        return one.process.pid

    async def recovered(self, name: str, instance: int = 0, *, since: int, limit_s: float = RECOVERY_LIMIT_S) -> float:
        """Return the seconds from the death of a killed instance until it was ready again, once it is.

        Args:
            name: the service.
            instance: which of its instances.
            since: the pid that was killed.
            limit_s: longest wait.

        Raises:
            NotBack: it was not ready again in time.
        """
        one = self._instance(name, instance)
        try:
            async with asyncio.timeout(limit_s):
                await one.until(lambda: one.is_ready and one.last is not None and one.last.pid != since)
        except TimeoutError:
            raise NotBack(
                f"{one} (pid {since} was killed) was not ready again in {limit_s:.0f} s; last event: {one.last}; "
                f"its log is {one.log.path}"
            ) from None
        assert one.last is not None and one.last.took_s is not None, "ready, so it has a time"  # noqa: PT018
        return one.last.took_s

    async def ended(self, name: str, instance: int = 0) -> Exit:
        """Return how an instance ended, once it has finished or was stopped; it raises as `wait` does."""
        return await asyncio.shield(self._lives[self._instance(name, instance)])

    def unwell(self) -> list[Event]:
        """Return the last death of each instance that is not ready now."""
        return [one.died for one in self._lives if one.died is not None and not one.is_ready]

    def state(self) -> State:
        """Return what is known about the services now."""
        return State(
            pid=os.getpid(),
            identity=identity_of(os.getpid()) or "",
            started_ms=self._started_ms,
            addresses=self._addresses,
            instances=[_describe(instance) for instance in self._lives if instance.process is not None],
        )

    async def _bring(self, name: str) -> None:
        """Bring a service up once, however many ask for it."""
        if name not in self._services:
            raise ConfigError(f"there is no service {name!r}; known are {', '.join(self._services)}")
        if name not in self._bringing:
            self._bringing[name] = asyncio.create_task(self._bring_up(self._services[name]), name=f"start {name}")
        await asyncio.shield(self._bringing[name])

    async def _bring_up(self, service: Service) -> None:
        await asyncio.gather(*(self._bring(name) for name in service.after))
        self._instances[service.name] = [self._make(service, index) for index in range(service.instances)]
        for instance in self._instances[service.name]:
            self._lives[instance] = asyncio.create_task(instance.live(), name=str(instance))
        await asyncio.gather(*(self._until_ready(instance) for instance in self._instances[service.name]))

    async def _until_ready(self, instance: Instance) -> None:
        life = self._lives[instance]
        settled = instance.until(lambda: instance.was_ready or instance.given_up_on)
        await race({"ready": settled, "ended": asyncio.shield(life)})
        if not (instance.was_ready or instance.given_up_on):
            raise SupervisorError(f"{instance} was stopped before it was ready")

    async def _stop_service(self, name: str, ended: Mapping[str, asyncio.Event]) -> None:
        for other in self._instances:
            if name in self._services[other].after:
                await ended[other].wait()
        for instance in self._instances[name]:
            instance.stop()
        # A life that failed has been reported by `start` or `wait`; here it only matters that it is over.
        await asyncio.gather(*(self._lives[one] for one in self._instances[name]), return_exceptions=True)
        for instance in self._instances[name]:
            instance.log.close()
        ended[name].set()

    def _make(self, service: Service, index: int) -> Instance:
        file = f"{service.name}.log" if service.instances == 1 else f"{service.name}-{index}.log"
        return Instance(
            service,
            index,
            log=LogFile(self._run_dir / "logs" / file),
            cwd=self._cwd,
            clock=self._clock,
            backoff=self._backoff,
            on_event=self._on_event,
        )

    def _instance(self, name: str, index: int) -> Instance:
        started = self._instances.get(name, [])
        if not 0 <= index < len(started):
            raise ConfigError(f"instance {index} of {name!r} was never started; started are {sorted(self._instances)}")
        return started[index]

    def _on_event(self, event: Event) -> None:
        self._write_state()
        if self._observer is not None:
            self._observer(event)

    def _write_state(self) -> None:
        assert self._runfile is not None, "services run only while the directory is held"
        try:
            self._runfile.write(self.state())
        except NoSpace as error:
            if not self._full:  # said once; what needs room says so itself
                log.warning("%s", error)
            self._full = True
        else:
            self._full = False


async def supervise(
    supervisor: Supervisor, *, before: Callable[[], None] | None = None, ready: Callable[[], None] | None = None
) -> None:
    """Run all services until a signal of `STOP_SIGNALS` or until one fails for good; then end them in order.

    A second signal kills what is left at once.

    Args:
        supervisor: not entered yet.
        before: called once the directory is ours, to write what the services read.
        ready: called when all services are ready.
    """
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            supervisor.kill_all()
        asked.set()

    async def run() -> None:
        if before is not None:
            before()
        await supervisor.start()
        if ready is not None:
            ready()
        await supervisor.wait()

    with _signals(on_signal):
        async with supervisor:
            await race({"asked": asked.wait(), "run": run()})


@contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    # `nohup rollmill up` is meant to outlive its terminal.
    heard = [one for one in STOP_SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    for number in heard:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


def _checked(services: Sequence[Service]) -> dict[str, Service]:
    """Return the services by name, each after those that it needs."""
    by_name = {service.name: service for service in services}
    if len(by_name) != len(services):
        raise ConfigError(f"two services have one name: {', '.join(service.name for service in services)}")
    for service in services:
        unknown = set(service.after) - by_name.keys()
        if unknown:
            raise ConfigError(f"{service.name} is to start after {', '.join(sorted(unknown))}, which is no service")
        if service.ready.check is None and service.restart is Restart.ALWAYS:
            raise ConfigError(f"{service.name} is ready when it has ended, so it cannot be restarted always")
    try:
        order = TopologicalSorter({service.name: service.after for service in services}).static_order()
        return {name: by_name[name] for name in order}
    except CycleError as error:
        raise ConfigError(f"services wait for each other in a circle: {' -> '.join(error.args[1])}") from error


def _describe(instance: Instance) -> InstanceState:
    assert instance.process is not None, "asked only for instances that were started"
    last = instance.last
    return InstanceState(
        service=instance.service.name,
        instance=instance.index,
        state=last.what if last is not None else What.STARTED,
        pid=instance.process.pid,
        identity=instance.process.identity,
        started_ms=instance.started_ms,
        lives=instance.lives,
        log=str(instance.log.path),
    )
