"""An environment host that may be away: what is repeated, what is not, and who waits."""

from __future__ import annotations

import asyncio

import pytest

from infra.clock import VirtualClock, settle
from infra.envhost.client import HostAway
from infra.envhost.local import LOCAL
from infra.envhost.patient import WAIT_S, PatientHost, PatientHosts, answers
from infra.envhost.protocol import Claimed, Create, Created
from infra.envhost.scripted import ScriptedFactory
from infra.errors import Failure
from infra.guard import Guards, unguarded
from infra.memory import MemoryBus
from infra.waiting import heard_by
from infra.wire import Publisher
from schemas.outcome import Boundary, FailureKind
from schemas.topics import TABLE
from tests.away import AwayHost


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
async def guards(clock):
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    guards = Guards(Publisher(bus, clock, "run-1"), clock, stage="run", worker="run-1")
    running = asyncio.create_task(guards.run())
    yield guards
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class Hosts:
    """Two hosts by address."""

    def __init__(self, one, other):
        self._hosts = {LOCAL: one, "other": other}
        other.named = "other"

    def at(self, address):
        return self._hosts[address]

    async def disconnect(self):
        pass


@pytest.fixture
async def local(clock):
    async with AwayHost(ScriptedFactory(), clock=clock) as host:
        yield host


@pytest.fixture
def host(local, clock, guards):
    return PatientHosts(local, clock, guards).at(LOCAL)


def request_for(clock, **changes):
    fields = {"run": "r", "group": "g", "sample": 0, "attempt": 0, "family": "scripted", "payload": {}, "seed": 7}
    return Create(**{**fields, "reap_at_ms": clock.now_ms() + 86_400_000, "wait_s": 20.0, **changes})


async def passing(clock, seconds):
    for _ in range(round(seconds * 2)):
        await clock.advance(0.5)
        await settle(50)


async def in_time(clock, seconds, work):
    """Start work, let time pass, and return what came of it."""
    running = asyncio.ensure_future(work)
    await settle(100)
    await passing(clock, seconds)
    return await asyncio.wait_for(running, 30)


async def test_a_create_waits_for_a_host_that_is_away_and_that_time_does_not_count(clock, local, host, guards):
    """A host that restarts costs no attempt, however short the task's own limit is."""
    local.away, said = True, []
    with heard_by(said.append):
        waiting = asyncio.create_task(host.create(request_for(clock)))
    await passing(clock, 300)
    before, refused = waiting.done(), local.refused
    local.away = False
    await passing(clock, 10)

    assert (False, True) == (before, guards.ready())
    assert isinstance(await asyncio.wait_for(waiting, 30), Created)
    assert refused < 8, "while it is away nobody but the probes asks"
    assert (f"the environment host at {LOCAL}, which is away", "") == (said[0], said[-1])


async def test_a_host_that_comes_and_goes_is_given_up_in_the_end(clock, local):
    """Where the breaker stays closed the limits count, and the failure says what was waited for."""
    local.away = True
    host = PatientHost(local, clock, unguarded(clock))
    with pytest.raises(HostAway, match="waited 20 s for create: connection refused") as failed:
        await in_time(clock, 30, host.create(request_for(clock)))
    with pytest.raises(HostAway, match=f"waited {WAIT_S:g} s for claim"):
        await in_time(clock, WAIT_S + 5, host.claim("lease"))

    assert (FailureKind.INFRASTRUCTURE, Boundary.ENVIRONMENT) == (failed.value.kind, failed.value.boundary)


async def test_a_claim_and_a_renewal_are_repeated(clock, local, host):
    """The one fences itself, the other says nothing new."""
    created = await host.create(request_for(clock))
    await host.ready(created.lease)
    local.away = True
    claiming = asyncio.create_task(host.claim(created.lease))
    await passing(clock, 1)
    local.away = False
    await passing(clock, 2)
    claim = await asyncio.wait_for(claiming, 30)

    assert isinstance(claim, Claimed)
    local.away = True
    renewing = asyncio.create_task(host.renew(claim.lease, claim.token))
    await passing(clock, 1)
    local.away = False
    await passing(clock, 2)
    assert await asyncio.wait_for(renewing, 30) is None


@pytest.mark.parametrize("call", ["step", "verdict"])
async def test_a_step_and_a_verdict_are_never_repeated(clock, local, host, call):
    """They may have been carried out."""
    created = await host.create(request_for(clock))
    claim = await host.claim(created.lease)
    local.away = True
    with pytest.raises(HostAway, match="connection refused"):
        await (host.step(claim.lease, claim.token, {"text": "a"}) if call == "step" else host.verdict(claim.lease, 1))

    assert local.refused == 1


async def test_a_failure_that_the_host_itself_tells_says_that_it_is_there(clock, local, host, guards):
    """A lost lease, again and again, is no outage."""
    for _ in range(10):
        with pytest.raises(Failure, match="is lost"):
            await host.claim("never-made")
        await passing(clock, 1)

    assert guards.ready()


async def test_a_host_that_is_away_while_another_is_there_is_not_waited_for(clock, local, guards):
    """Its episodes start again elsewhere instead of holding this worker's places."""
    async with AwayHost(ScriptedFactory(), clock=clock) as other:
        hosts = PatientHosts(Hosts(local, other), clock, guards)
        hosts.at("other")
        local.away = True
        waiting = [asyncio.create_task(hosts.at(LOCAL).claim("lease")) for _ in range(5)]
        await passing(clock, 10)
        failed = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)

        assert guards.ready()
        assert all(isinstance(one, HostAway) and "another one is there" in one.cause for one in failed)


async def test_the_probe_asks_how_the_host_is(clock, local):
    """Any answer will do."""
    there = await answers(local)
    local.away = True

    assert (True, False) == (there, await answers(local))
