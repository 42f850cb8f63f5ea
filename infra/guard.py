"""The breakers of one worker: its calls report to them, its waits ask them, `control` hears of them.

A `Guard` stands before one service at one address. While it is open nobody calls the service but its probe, and whoever
would call waits in `closed`. That wait has no limit of its own: it is part of a stage's budget, which stands still for
as long as the breaker's open time grows, and that has a limit in each outage.

`Guards` holds those of one worker. The worker takes nothing new while every address of a service is away
(`ready`), and its budgets stand still for that long (`still_s`): such an outage of the whole service begins when its
last address goes, whatever happened to the others before. One address of several is another matter: whoever waited for
it would in the end hold all places of the worker, so its work is better done elsewhere (`replaceable`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections import deque
from collections.abc import Awaitable, Callable

from infra.breaker import BreakerLimits, CircuitBreaker, State
from infra.clock import Clock
from infra.errors import BusError
from infra.wire import Publisher
from schemas.control import Breaker, Outage
from schemas.topics import CONTROL

log = logging.getLogger(__name__)

REPORT_S = 5.0
"""An open breaker is written to `control` this often, seconds, and when it opens or closes."""

OUTAGES = 64
"""Outages that a record remembers; older ones are over for every sample that is still on its way, or nearly so."""

CAUSE_CHARS = 300
"""Longest cause in a record, characters."""

Probe = Callable[[], Awaitable[bool]]
"""Asks the service something cheap and tells whether it is there; has a limit of its own."""


class Guard:
    """Stands before one service at one address."""

    def __init__(
        self,
        service: str,
        address: str,
        probe: Probe,
        clock: Clock,
        limits: BreakerLimits | None = None,
    ) -> None:
        """Build a closed guard.

        Args:
            service: what it is, such as `policy`.
            address: where it is.
            probe: asks whether it is there.
            clock: time.
            limits: when it opens.
        """
        self.service = service
        self.address = address
        self.cause = ""
        """What the last call that failed said."""
        self.before_closing: Callable[[], None] = _nothing
        """Called in the last moment of each outage."""
        self._probe = probe
        self._clock = clock
        self._breaker = CircuitBreaker(limits)
        self._closed = asyncio.Event()
        self._closed.set()
        self._opened = asyncio.Event()
        self._since_ms = 0
        self._over: deque[Outage] = deque(maxlen=OUTAGES)

    @property
    def open(self) -> bool:
        """Tell whether the service is away."""
        return self._breaker.state is not State.CLOSED

    @property
    def open_s(self) -> float:
        """The open time so far, seconds."""
        return self._breaker.open_s(self._clock.monotonic())

    @property
    def since(self) -> float:
        """When the present outage began, monotonic seconds; of no meaning while there is none."""
        return self._breaker.since

    @property
    def counted_s(self) -> float:
        """Seconds that count against limits on waits: all but the open time.

        They go back once in each outage, when the breaker opens: what has passed since the first call that failed is
        open time too, and only now known to be.
        """
        return self._clock.monotonic() - self.open_s

    def let_go(self) -> None:
        """Take that nobody will call the service any more: an outage of it is over with the next probe."""
        self._probe = there

    async def closed(self) -> None:
        """Return once the service may be called."""
        await self._closed.wait()

    async def opened(self) -> None:
        """Return once the service is away."""
        await self._opened.wait()

    def succeeded(self) -> None:
        """Take the answer of a call."""
        self._breaker.succeeded()

    def failed(self, cause: str) -> None:
        """Take a call that reached nobody."""
        self.cause, was_open, now = cause, self.open, self._clock.monotonic()
        self._breaker.failed(now)
        if self.open and not was_open:
            self._since_ms = self._clock.now_ms() - int((now - self._breaker.since) * 1000)
            self._closed.clear()
            self._opened.set()
            log.warning("%s at %s is away, nobody calls it: %s", self.service, self.address, cause)

    async def look(self) -> bool:
        """Wait until a probe is due, make it, and tell whether the service is back."""
        due = self._breaker.probe_at
        await self._clock.sleep(due - self._clock.monotonic())
        # A sleep may end a rounding error too early; asking again at once would find the same time again.
        if self._breaker.probe(max(due, self._clock.monotonic())):
            well = False
            try:
                well = await self._probe()
            finally:
                self._probed(well=well)
        return not self.open

    def _probed(self, *, well: bool) -> None:
        if well:
            self._over.append(self._outage())
            self.before_closing()
        self._breaker.probed(self._clock.monotonic(), well=well)
        if well:
            self._opened.clear()
            self._closed.set()
            what = "is there again" if self._probe is not there else "is called no longer"
            log.info("%s at %s %s", self.service, self.address, what)

    def _outage(self) -> Outage:
        lasts_ms = int(self._breaker.outage_s(self._clock.monotonic()) * 1000)
        return Outage(since_ms=self._since_ms, until_ms=self._since_ms + lasts_ms)

    def record(self, stage: str, worker: str) -> Breaker:
        """Return what is known of the service, for `control`."""
        return Breaker(
            service=self.service,
            address=self.address,
            stage=stage,
            worker=worker,
            open=self.open,
            since_ms=self._since_ms,
            open_ms=int(self.open_s * 1000),
            outages=(*self._over, *((self._outage(),) if self.open else ())),
            cause=self.cause[:CAUSE_CHARS] if self.open else "",
            at_ms=self._clock.now_ms(),
        )


def _nothing() -> None:
    """Do nothing about the end of an outage that does not count."""


async def there() -> bool:
    """Tell that a service is there, without asking."""
    return True


def unguarded(clock: Clock) -> Guard:
    """Return a guard that never opens: for callers that have none."""
    return Guard("", "", there, clock, BreakerLimits(failures=sys.maxsize))


class _Addresses:
    """The guards of one service at all of its addresses, and for how long it was away at all of them at once."""

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self.guards: list[Guard] = []
        self._clock = clock
        self._longest_s = longest_s
        self._past_s = 0.0
        self._settled_at = -math.inf
        """Up to when the past is counted, monotonic seconds."""
        self._added_s = 0.0
        """What the present outage has added to the past."""

    @property
    def away(self) -> bool:
        """Tell whether there is no address left."""
        return bool(self.guards) and all(guard.open for guard in self.guards)

    @property
    def away_s(self) -> float:
        """The time without one so far, seconds; each outage of all adds `longest_s` at most."""
        if not self.away:
            return self._past_s
        present_s = self._clock.monotonic() - max(self._settled_at, *(guard.since for guard in self.guards))
        return self._past_s + min(present_s, self._longest_s - self._added_s)

    def settle(self) -> None:
        """Keep what the present outage has added: an address is met, or counts no longer."""
        away_s = self.away_s
        self._added_s += away_s - self._past_s
        self._past_s, self._settled_at = away_s, self._clock.monotonic()

    def end(self) -> None:
        """Keep it: the outage is over, since an address that counts comes back."""
        self.settle()
        self._added_s = 0.0

    def add(self, guard: Guard) -> None:
        """Count an address; if it is well there is no outage any more."""
        self.settle()
        self.guards.append(guard)
        guard.before_closing = self.end
        if not guard.open:
            self._added_s = 0.0

    def remove(self, guard: Guard) -> None:
        """Count an address no longer."""
        self.settle()
        self.guards.remove(guard)
        guard.before_closing = _nothing


class Guards:
    """All guards of one worker."""

    def __init__(
        self, publisher: Publisher, clock: Clock, *, stage: str, worker: str, limits: BreakerLimits | None = None
    ) -> None:
        """Build them.

        Args:
            publisher: writes to `control`.
            clock: time.
            stage: what the worker does, for the record.
            worker: its name, for the record.
            limits: when breakers open.
        """
        self._publisher = publisher
        self._clock = clock
        self._stage = stage
        self._worker = worker
        self._limits = limits
        self._guards: dict[tuple[str, str], Guard] = {}
        self._services: dict[str, _Addresses] = {}
        self._new: asyncio.Queue[Guard] = asyncio.Queue()
        self._watches: dict[Guard, asyncio.Task[None]] = {}

    @property
    def longest_s(self) -> float:
        """Most time that one outage adds to a budget, seconds."""
        return (self._limits or BreakerLimits()).longest_s

    def guard(self, service: str, address: str, probe: Probe) -> Guard:
        """Return the guard of a service at an address."""
        key = (service, address)
        if key not in self._guards:
            self._guards[key] = self._make(service, address, probe)
            self._new.put_nowait(self._guards[key])
        return self._guards[key]

    def _make(self, service: str, address: str, probe: Probe) -> Guard:
        guard = Guard(service, address, probe, self._clock, self._limits)
        self._services.setdefault(service, _Addresses(self._clock, self.longest_s)).add(guard)
        return guard

    def let_go(self, guard: Guard) -> None:
        """Take that a service is at that address no longer; if it is away, its record says so until the next probe."""
        self._guards.pop((guard.service, guard.address), None)
        self.count(guard, counts=False)
        guard.let_go()
        if guard in self._watches and not guard.open:
            self._watches.pop(guard).cancel()

    def count(self, guard: Guard, *, counts: bool) -> None:
        """Say whether the service is there as long as it is at that address: not if it takes no work there."""
        known = self._services[guard.service]
        if (guard in known.guards) is counts:
            return
        if counts:
            known.add(guard)
        else:
            known.remove(guard)

    def away(self, service: str) -> bool:
        """Tell whether a service is away at all of its addresses."""
        return service in self._services and self._services[service].away

    def away_s(self, service: str) -> float:
        """Return for how long a service was away at all of its addresses, seconds; it never shrinks."""
        return self._services[service].away_s if service in self._services else 0.0

    def ready(self) -> bool:
        """Tell whether new work may be begun: no service is away at all of its addresses."""
        return not any(known.away for known in self._services.values())

    def still_s(self) -> float:
        """Return for how long work could not be done so far, seconds; it never shrinks.

        Two services that are away at the same time count both: generous, and each of them has its limit.
        """
        return sum(known.away_s for known in self._services.values())

    def replaceable(self, away: Guard) -> bool:
        """Tell whether the same service is there at another address."""
        return not self._services[away.service].away

    async def run(self) -> None:
        """See every outage through until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                guard = await self._new.get()
                if guard in self._guards.values():
                    self._watches[guard] = group.create_task(self._watch(guard))

    async def _watch(self, guard: Guard) -> None:
        while guard in self._guards.values():
            await guard.opened()
            await self._see_through(guard)
        self._watches.pop(guard, None)

    async def _see_through(self, guard: Guard) -> None:
        """Probe a service that is away until it is back, and say so on the way."""
        said_at = self._clock.monotonic()
        await self._say(guard)
        while not await guard.look():
            if self._clock.monotonic() - said_at >= REPORT_S:
                said_at = self._clock.monotonic()
                await self._say(guard)
        await self._say(guard)

    async def _say(self, guard: Guard) -> None:
        try:
            await self._publisher.publish(CONTROL, guard.record(self._stage, self._worker))
        except BusError as error:
            # The next record says it all again.
            log.warning("breaker of %s at %s not written: %s", guard.service, guard.address, error)
