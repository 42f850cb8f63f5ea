"""The host itself: environments under leases, driven by one caller at a time; no socket.

`server.py` puts it behind one, `local.py` uses it in the same process.

Invariants: an environment is touched under its lock only, and a caller who gives up does not free the lock before the
call has ended; whether a caller may touch it is asked of the lease table after the lock was taken, so that a claim
fences even a step that waits or runs; every environment that was built is closed exactly once; one that raises is a
`Failure` of its caller and of nobody else. The host is told by a function which samples are withdrawn: it builds
nothing for them, and `sweep` closes what they have, in any state. Their leases answer as closed ones, so that whoever
comes for one of them has nothing to do; what ends the sample in the log is the stages' and the reaper's.

Environments are synchronous code of third parties, so their calls run in threads. One that declares `fast = True`
promises that a call takes well under a millisecond and never blocks; it runs on the event loop, which saves two
thread switches per step. This file knows no task family.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from infra.clock import Clock, SystemClock
from infra.envhost.environment import Environment, EnvironmentFactory, StepResult
from infra.envhost.lease import Fenced, Lease, LeaseKey, LeaseLimits, LeaseTable, lost
from infra.envhost.protocol import Claimed, Closed, Counts, Create, Created, HostFull, Stepped
from infra.errors import Failure, boundary
from schemas.outcome import Boundary, FailureKind

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """What one host takes on."""

    capacity: int = 1024
    """Environments held at most."""
    create_wait_s: float = 20.0
    """A create waits this many seconds at most for a free place; the client asks again."""
    threads: int = 16
    """Calls into environments that run at the same time."""
    call_s: float = 120.0
    """A call into an environment that takes longer, seconds, fails and loses the lease."""
    reap_every_s: float = 1.0
    """Leases that ran out are looked for this often, seconds."""
    stop_s: float = 10.0
    """Closing all environments at the end takes at most this many seconds."""
    leases: LeaseLimits = field(default_factory=LeaseLimits)
    """How long leases live."""


def nobody(_: LeaseKey) -> bool:
    """Tell that no sample is withdrawn: for a host that follows no log."""
    return False


@dataclass(slots=True)
class _Slot:
    """An environment and what goes with it."""

    environment: Environment
    observation: str
    fast: bool
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvHost:
    """Holds environments; all methods belong to one event loop.

    Args:
        factory: builds environments; raises ValueError for a bad payload.
        clock: for leases and waits.
        limits: what the host takes on.
        instance: names this start of the host in lease ids; random by default.
        withdrawn: tells whether a sample was cancelled; by default none is.
        threads: where environments are called; by default a pool of its own. It ends with the host.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        *,
        clock: Clock | None = None,
        limits: HostLimits | None = None,
        instance: str | None = None,
        withdrawn: Callable[[LeaseKey], bool] = nobody,
        threads: ThreadPoolExecutor | None = None,
    ) -> None:
        self.limits = limits or HostLimits()
        self.instance = instance or secrets.token_hex(4)
        self._factory = factory
        self._withdrawn = withdrawn
        self._clock = clock or SystemClock()
        self._table = LeaseTable(self.instance, self.limits.leases)
        self._slots: dict[str, _Slot] = {}
        self._builds: dict[LeaseKey, asyncio.Task[str]] = {}
        self._places = asyncio.Semaphore(self.limits.capacity)
        self._held = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._threads = threads or ThreadPoolExecutor(self.limits.threads, thread_name_prefix="environment")
        self._stopped = False

    async def create(self, request: Create) -> Created | Closed:
        """Build and reset an environment, or give the one that the attempt has already.

        Raises:
            HostFull: no place was free in time.
            Failure: the task is invalid, or its environment failed.
        """
        key = LeaseKey(request.run, request.group, request.sample, request.attempt)
        lease = self._table.find(key, self._now())
        if lease is None:
            if self._withdrawn(key):
                return Closed(lease="")
            lease_id = await self._build_once(key, request)
            if self._withdrawn(key):
                return Closed(lease=lease_id)
        elif lease.id in self._slots:
            lease_id = lease.id
        else:
            return Closed(lease=lease.id)
        self._table.renew(lease_id, self._now())
        return Created(lease=lease_id, observation=self._slot(lease_id).observation)

    async def renew(self, lease: str, token: int | None = None) -> None:
        """Postpone the end of a lease."""
        self._table.renew(lease, self._now(), token)

    async def ready(self, lease: str) -> None:
        """Keep the lease until its `reap_at`: the Episode is in the log."""
        self._table.ready(lease, self._now())

    async def claim(self, lease: str) -> Claimed | Closed:
        """Give the environment to the caller, at its start, and fence whoever had it."""
        claimed = self._table.claim(lease, self._now())
        if claimed is None:
            return Closed(lease=lease)
        token, slot = claimed.token, self._slot(lease)

        async def rewind() -> Claimed:
            self._table.renew(lease, self._now(), token)
            if again := claimed.stepped:
                await self._reset(slot, claimed)
            return Claimed(lease=lease, token=token, observation=slot.observation, reset=again)

        return await self._alone(lease, rewind)

    async def step(self, lease: str, token: int, action: Mapping[str, Any]) -> Stepped:
        """Carry out one action for the holder of the valid claim."""

        async def act() -> Stepped:
            self._table.step(lease, token, self._now())
            result = await self._call(slot, lambda: slot.environment.step(action))
            self._table.renew(lease, self._now(), token)
            return _stepped(result)

        self._table.renew(lease, self._now(), token)
        slot = self._slot(lease)
        return await self._alone(lease, act)

    async def verdict(self, lease: str, token: int) -> dict[str, Any]:
        """Return the final state to the holder of the valid claim; the lease stays claimed."""

        async def judge() -> dict[str, Any]:
            self._table.renew(lease, self._now(), token)
            return _plain(await self._call(slot, slot.environment.verdict))

        self._table.renew(lease, self._now(), token)
        slot = self._slot(lease)
        return await self._alone(lease, judge)

    async def close(self, lease: str, token: int) -> None:
        """Close the lease for good: an output of it is in the log."""
        if self._table.close(lease, token, self._now()):
            await asyncio.shield(self._dispose(lease))

    async def withdraw(self, lease: str) -> None:
        """Close the lease for good, whoever holds it: its sample was cancelled, and that is in the log."""
        if self._table.withdraw(lease, self._now()):
            await asyncio.shield(self._dispose(lease))

    def sweep(self) -> int:
        """Close the environments of samples that were withdrawn; return how many."""
        found = [lease.id for lease in self._table.open() if self._withdrawn(lease.key)]
        for lease in found:
            self._table.withdraw(lease, self._now())
            self._dispose(lease)
        if found:
            log.info("%d environments closed, their samples were cancelled", len(found))
        return len(found)

    def counts(self) -> Counts:
        """Return how many leases and environments there are."""
        leases = self._table.counts()
        return Counts(instance=self.instance, capacity=self.limits.capacity, leases=leases, environments=self._held)

    def reap(self) -> int:
        """Close the environments of leases that ran out; return how many."""
        ran_out = self._table.expire(self._now())
        for lease in ran_out:
            self._dispose(lease)
        if ran_out:
            log.info("%d leases ran out, such as %s", len(ran_out), ran_out[0])
        return len(ran_out)

    async def run(self) -> None:
        """Reap until cancelled."""
        while True:
            await self._clock.sleep(self.limits.reap_every_s)
            self.reap()

    async def stop(self) -> None:
        """Close all environments and take no more; how many did not close in time is in the log."""
        self._stopped = True
        for lease in list(self._slots):
            self._table.drop(lease)
            self._dispose(lease)
        try:
            async with asyncio.timeout(self.limits.stop_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            log.warning("%d environments did not close within %g s", self._held, self.limits.stop_s)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _now(self) -> float:
        return self._clock.monotonic()

    def _slot(self, lease: str) -> _Slot:
        if slot := self._slots.get(lease):
            return slot
        raise lost(lease)

    # -- building ---------------------------------------------------------------------------------------------------

    async def _build_once(self, key: LeaseKey, request: Create) -> str:
        build = self._builds.get(key)
        if build is None:
            await self._take_place(request.wait_s)
            lease = self._table.find(key, self._now())
            build = self._builds.get(key)
            if lease or build or self._stopped:
                self._give_place()
            if lease:
                return lease.id
            if self._stopped:
                raise Failure(FailureKind.INFRASTRUCTURE, Boundary.ENVIRONMENT, "the environment host is stopping")
            if build is None:
                build = self._builds[key] = self._spawn(self._build(key, request))
        try:
            async with asyncio.timeout(self.limits.call_s):
                return await asyncio.shield(build)
        except TimeoutError:
            raise self._too_slow(f"building an environment of family {request.family!r}") from None

    async def _build(self, key: LeaseKey, request: Create) -> str:
        def make() -> tuple[Environment, str]:
            environment = _built(self._factory, request)
            try:
                return environment, _text(environment.reset())
            except (Exception, SystemExit):
                environment.close()
                raise

        try:
            with boundary(Boundary.ENVIRONMENT, FailureKind.HANDLER):
                environment, observation = await self._thread(make)
        except BaseException:
            self._give_place()
            raise
        finally:
            del self._builds[key]
        reap_at = self._now() + (request.reap_at_ms - self._clock.now_ms()) / 1000
        lease = self._table.create(key, reap_at, self._now())
        self._slots[lease.id] = _Slot(environment, observation, getattr(environment, "fast", False) is True)
        if self._stopped:
            self._table.drop(lease.id)
            self._dispose(lease.id)
        elif self._withdrawn(key):  # while it was built
            self._table.withdraw(lease.id, self._now())
            self._dispose(lease.id)
        return lease.id

    async def _take_place(self, wait_s: float) -> None:
        if self._places.locked():
            await self._wait_for_place(min(wait_s, self.limits.create_wait_s))
        else:
            await self._places.acquire()
        self._held += 1

    async def _wait_for_place(self, wait_s: float) -> None:
        place = asyncio.ensure_future(self._places.acquire())
        limit = asyncio.ensure_future(self._clock.sleep(wait_s))
        try:
            await asyncio.wait({place, limit}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not place.cancel():
                self._places.release()
            raise
        finally:
            limit.cancel()
        if place.cancel():
            raise HostFull(
                f"waited {wait_s:g} s for one of {self.limits.capacity} places on the environment host; "
                "finish or cancel episodes, raise `capacity`, or start another host"
            )

    def _give_place(self) -> None:
        self._held -= 1
        self._places.release()

    # -- calling ----------------------------------------------------------------------------------------------------

    async def _alone(self, lease: str, section: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a section under the environment's lock, to its end whatever becomes of the caller."""
        slot = self._slot(lease)
        if slot.fast:
            # Nothing in the section suspends, so there is nothing to shield.
            async with slot.lock:
                return await section()

        async def locked() -> T:
            async with slot.lock:
                return await section()

        try:
            async with asyncio.timeout(self.limits.call_s):
                return await asyncio.shield(self._spawn(locked()))
        except TimeoutError:
            self._table.drop(lease)
            self._dispose(lease)
            raise self._too_slow(f"a call into the environment of lease {lease}") from None

    async def _call(self, slot: _Slot, function: Callable[[], T]) -> T:
        with boundary(Boundary.ENVIRONMENT, FailureKind.HANDLER):
            return function() if slot.fast else await self._thread(function)

    async def _thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def _reset(self, slot: _Slot, lease: Lease) -> None:
        observation = await self._call(slot, lambda: _text(slot.environment.reset()))
        if observation != slot.observation:
            self._table.drop(lease.id)
            self._dispose(lease.id)
            raise Failure(
                FailureKind.ENVIRONMENT_LOST,
                Boundary.ENVIRONMENT,
                f"reset gave {observation[:200]!r}, the episode began with {slot.observation[:200]!r}: this family's "
                "environments are not exactly resettable, so the attempt starts anew",
            )
        self._table.was_reset(lease.id)

    def _dispose(self, lease: str) -> asyncio.Future[None]:
        """Close an environment in the background, once nobody is inside it; the lease is gone or closed already."""
        slot = self._slots.pop(lease, None)
        if slot is None:
            gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            gone.set_result(None)
            return gone
        return self._spawn(self._finish(lease, slot))

    async def _finish(self, lease: str, slot: _Slot) -> None:
        try:
            async with slot.lock:
                await self._call(slot, slot.environment.close)
        except Failure as failure:
            log.warning("closing the environment of lease %s failed: %s", lease, failure)
        finally:
            self._give_place()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # Whoever waits gets the error; if the caller has gone it is nobody's, and asking marks it as seen.
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, Failure | Fenced):
            log.error("a call of the environment host broke", exc_info=error)

    def _too_slow(self, what: str) -> Failure:
        return Failure(
            FailureKind.INFRASTRUCTURE,
            Boundary.ENVIRONMENT,
            f"{what} took more than {self.limits.call_s:g} s; the lease is given up and the thread stays taken until "
            "the call ends",
        )


def _built(factory: EnvironmentFactory, request: Create) -> Environment:
    try:
        return factory(request.family, request.payload, request.seed)
    except ValueError as error:
        raise Failure(FailureKind.INVALID_TASK, Boundary.TASK, str(error)) from error


def _failed(cause: str) -> Failure:
    return Failure(FailureKind.HANDLER, Boundary.ENVIRONMENT, cause)


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise _failed(f"reset returned {type(observation).__name__}, not a text")
    return observation


def _stepped(result: Any) -> Stepped:
    if not isinstance(result, StepResult) or not isinstance(result.observation, str):
        raise _failed(f"step returned {str(result)[:200]}, not a StepResult with a text")
    return Stepped(observation=result.observation, done=bool(result.done))


def _plain(verdict: Any) -> dict[str, Any]:
    """Return the verdict as it will be read from the log, so that a bad one fails here and not in EVAL."""
    try:
        plain: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(verdict))
    except (TypeError, ValueError, OverflowError) as error:
        raise _failed(f"the verdict has no msgpack form: {error}") from error
    if not isinstance(plain, dict):
        raise _failed(f"the verdict is {type(verdict).__name__}, not a map")
    return plain
