"""The breakers of one worker: who waits, what stands still, what `control` hears."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager

import pytest

from infra.breaker import BreakerLimits
from infra.clock import VirtualClock, settle
from infra.errors import BusError
from infra.guard import REPORT_S, Guards, unguarded
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from schemas.topics import CONTROL, TABLE
from tests.logs import read_all

LIMITS = BreakerLimits(longest_s=100.0)


class Service:
    """Something at an address that may be away."""

    def __init__(self):
        self.there, self.asked = True, 0

    async def probe(self):
        """Tell whether it is there."""
        self.asked += 1
        return self.there


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
async def bus(clock):
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    return bus


@pytest.fixture
def guards(bus, clock):
    return Guards(Publisher(bus, clock, "run-1"), clock, stage="run", worker="run-1", limits=LIMITS)


@asynccontextmanager
async def watched(guards):
    """See outages through while the block runs."""
    running = asyncio.create_task(guards.run())
    await settle()
    try:
        yield
        assert not running.done(), running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def fail(clock, guard):
    """Let calls fail until the guard is open."""
    for _ in range(3):
        guard.failed("connection refused")
        await clock.advance(1.0)


async def said(bus):
    """Return the records of `control`."""
    return [(await unpack(CONTROL, record)).message for record in await read_all(bus, CONTROL)]


async def test_whoever_would_call_waits_until_a_probe_finds_the_service(clock, guards):
    """Nobody else asks it meanwhile."""
    service = Service()
    guard = guards.guard("policy", "http://here", service.probe)
    async with watched(guards):
        service.there = False
        await fail(clock, guard)
        waiting = [asyncio.create_task(guard.closed()) for _ in range(20)]
        await clock.advance(10)
        still_waiting, asked = [not one.done() for one in waiting], service.asked
        service.there = True
        await clock.advance(5)

        assert all(still_waiting)
        assert 0 < asked < 6
        assert all(one.done() for one in waiting)


async def test_new_work_is_begun_only_while_every_service_is_there(clock, guards):
    """One of them that is away is enough to stop; it goes on by itself."""
    policy, host = Service(), Service()
    guards.guard("envhost", "unix:/a", host.probe)
    guard = guards.guard("policy", "http://here", policy.probe)
    async with watched(guards):
        before = guards.ready()
        policy.there = False
        await fail(clock, guard)
        during = guards.ready()
        policy.there = True
        await clock.advance(5)

        assert (True, False, True) == (before, during, guards.ready())


async def test_one_address_of_several_does_not_stop_the_work_of_the_others(clock, guards):
    """Its own work is better done elsewhere; when all are away there is no elsewhere."""
    one, other = Service(), Service()
    first, second = guards.guard("envhost", "unix:/a", one.probe), guards.guard("envhost", "unix:/b", other.probe)
    async with watched(guards):
        one.there = other.there = False
        await fail(clock, first)
        alone = (guards.ready(), guards.replaceable(first), guards.still_s())
        await fail(clock, second)

        assert (True, True, 0.0) == alone
        assert (False, False) == (guards.ready(), guards.replaceable(first))
        assert guards.still_s() > 0


async def test_time_stands_still_for_as_long_as_a_service_is_away_but_not_for_ever(clock, guards):
    """Budgets and waits begin to count again once an outage has used up its limit."""
    service = Service()
    guard = guards.guard("policy", "http://here", service.probe)
    async with watched(guards):
        service.there = False
        patience = guard.counted_s
        await fail(clock, guard)
        await clock.advance(50)
        within = (guards.still_s(), guard.counted_s - patience)
        await clock.advance(200)

        assert (53.0, 0.0) == within
        assert (LIMITS.longest_s, 253.0 - LIMITS.longest_s) == (guards.still_s(), guard.counted_s - patience)


async def test_an_address_that_is_met_later_does_not_take_back_the_time(clock, guards):
    """What a job was given stays given."""
    service = Service()
    guard = guards.guard("envhost", "unix:/a", service.probe)
    await fail(clock, guard)
    before = guards.still_s()
    guards.guard("envhost", "unix:/b", service.probe)

    assert 0 < before <= guards.still_s()


async def away(clock, guard, service, seconds):
    """Let a service be away for so long, and be found again."""
    service.there = False
    await fail(clock, guard)
    await clock.advance(seconds)
    service.there = True
    await clock.advance(LIMITS.longest_pause_s)


async def test_addresses_that_were_away_one_after_the_other_cost_no_time(clock, guards):
    """Work went on elsewhere all the time."""
    services = [Service(), Service()]
    hosts = [guards.guard("envhost", f"unix:/{at}", service.probe) for at, service in enumerate(services)]
    async with watched(guards):
        for host, service in zip(hosts, services, strict=True):
            await away(clock, host, service, 60)

    assert (True, 0.0) == (guards.ready(), guards.still_s())


async def test_time_that_one_address_was_away_alone_is_not_taken_off_an_outage_of_all(clock, guards):
    """Neither that before the other one was met, nor that of one that never came back."""
    one, other = Service(), Service()
    first = guards.guard("envhost", "unix:/a", one.probe)
    async with watched(guards):
        await away(clock, first, one, 60)
        alone = guards.still_s()
        second = guards.guard("envhost", "unix:/b", other.probe)
        one.there = other.there = False
        await fail(clock, first)
        await clock.advance(2 * LIMITS.longest_s)
        before = guards.still_s()
        await fail(clock, second)
        await clock.advance(27)
        both = guards.still_s()
        other.there = True
        await clock.advance(60)

        assert (alone, alone + 30.0) == (before, both)
        assert both <= guards.still_s() <= both + LIMITS.longest_pause_s


async def test_control_hears_of_an_outage_when_it_begins_now_and_then_and_when_it_ends(bus, clock, guards):
    """With the time it has lasted, summed over all outages."""
    service = Service()
    guard = guards.guard("policy", "http://here", service.probe)
    began_ms = clock.now_ms()
    async with watched(guards):
        for lasts_s in (28, 8):
            service.there = False
            await fail(clock, guard)
            await clock.advance(lasts_s)
            service.there = True
            await clock.advance(5)
    records = await said(bus)

    assert all(("policy", "http://here", "run", "run-1") == (r.service, r.address, r.stage, r.worker) for r in records)
    assert (True, False) == (records[0].open, records[-1].open)
    assert (began_ms, "connection refused", "") == (records[0].since_ms, records[0].cause, records[-1].cause)
    opened = [record.at_ms for record in records if record.open][:5]
    assert all(later - earlier >= REPORT_S * 1000 for earlier, later in itertools.pairwise(opened))
    assert [record.open_ms for record in records] == sorted(record.open_ms for record in records)
    lasted = [outage.until_ms - outage.since_ms for outage in records[-1].outages]
    assert (2, records[-1].open_ms) == (len(lasted), sum(lasted))


async def test_a_service_that_is_there_is_not_written_of(bus, clock, guards):
    """Nor is one that failed once."""
    guard = guards.guard("policy", "http://here", Service().probe)
    async with watched(guards):
        guard.failed("connection reset")
        guard.succeeded()
        await clock.advance(60)

    assert [] == await said(bus)


async def test_a_log_that_is_away_does_not_keep_the_service_away(bus, clock, guards, monkeypatch):
    """The next record says it all again."""
    service = Service()
    guard = guards.guard("policy", "http://here", service.probe)

    async def refuse(*_, **__):
        raise BusError("the broker is away")

    async with watched(guards):
        service.there = False
        with monkeypatch.context() as broken:
            broken.setattr(bus, "publish", refuse)
            await fail(clock, guard)
            await clock.advance(20)
        service.there = True
        await clock.advance(5)

    assert (False, 1) == (guard.open, len(await said(bus)))


async def test_without_a_guard_nothing_is_ever_away(clock):
    """For callers that have none: they wait as long as they are told to."""
    guard = unguarded(clock)
    for _ in range(1000):
        guard.failed("connection refused")
        await clock.advance(1)
    await guard.closed()

    assert (False, clock.monotonic()) == (guard.open, guard.counted_s)
