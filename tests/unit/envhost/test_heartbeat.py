from __future__ import annotations

import asyncio

import pytest

from infra.clock import VirtualClock, settle
from infra.envhost.heartbeat import HEARTBEAT_S, heartbeat
from infra.envhost.host import HostLimits
from infra.envhost.lease import Fenced
from infra.envhost.local import LocalEnvHost
from infra.envhost.protocol import Create
from infra.envhost.scripted import FastScriptedEnvironment, ScriptedFactory
from infra.errors import Failure
from schemas.outcome import FailureKind


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
async def host(clock):
    async with LocalEnvHost(ScriptedFactory(FastScriptedEnvironment), clock=clock, limits=HostLimits()) as host:
        yield host


async def claimed(host, clock):
    created = await host.create(
        Create(
            run="r",
            group="g",
            sample=0,
            attempt=0,
            family="f",
            payload={},
            seed=1,
            reap_at_ms=clock.now_ms() + 10_000_000,
        )
    )
    return await host.claim(created.lease)


async def test_a_heartbeat_keeps_a_claim_through_a_long_generation(host, clock):
    """A minute without a step is no reason to lose an environment while its worker is alive."""
    taken = await claimed(host, clock)
    async with heartbeat(host, taken.lease, taken.token, clock=clock):
        await clock.advance(600)

    assert await host.verdict(taken.lease, taken.token) == {"actions": [], "seed": 1}
    await clock.advance(60)
    with pytest.raises(Failure):
        await host.verdict(taken.lease, taken.token)


async def test_a_fenced_worker_stops_what_it_was_doing(host, clock):
    """What it would still sample could not be published, so the block is cancelled."""
    taken = await claimed(host, clock)
    entered = asyncio.Event()

    async def work() -> None:
        async with heartbeat(host, taken.lease, taken.token, clock=clock):
            entered.set()
            await asyncio.Event().wait()

    worker = asyncio.create_task(work())
    await entered.wait()
    await settle()
    await host.claim(taken.lease)
    await clock.advance(HEARTBEAT_S)

    with pytest.raises(Fenced):
        await worker


async def test_a_lost_lease_ends_the_block_with_its_failure(host, clock):
    """The environment is gone: another attempt, at once instead of at the next step."""
    taken = await claimed(host, clock)

    async def work() -> None:
        async with heartbeat(host, taken.lease, taken.token, clock=clock, every_s=120):
            await settle()
            await clock.advance(120)
            await asyncio.Event().wait()

    with pytest.raises(Failure) as failed:
        await work()

    assert failed.value.kind is FailureKind.ENVIRONMENT_LOST


async def test_an_error_of_the_block_leaves_it_as_it_is(host, clock):
    """The heartbeat does not dress up what the block raises."""
    taken = await claimed(host, clock)
    with pytest.raises(ValueError, match="mine"):
        async with heartbeat(host, taken.lease, taken.token, clock=clock):
            raise ValueError("mine")
