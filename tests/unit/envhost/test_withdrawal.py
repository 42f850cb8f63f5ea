"""Environments of cancelled samples: closed at once, in whatever state their leases are."""

from __future__ import annotations

import asyncio
import threading

import pytest

from infra.cancellation import Cancellation
from infra.clock import SystemClock, VirtualClock, settle
from infra.envhost.client import HttpEnvHost
from infra.envhost.host import EnvHost
from infra.envhost.lease import Fenced
from infra.envhost.protocol import Closed, Create, Created
from infra.envhost.scripted import ScriptedFactory
from infra.envhost.server import serve
from infra.memory import MemoryBus
from infra.wire import Publisher
from schemas.control import Cancel
from schemas.topics import CONTROL, TABLE
from tests.logs import wait_until

ACTION = {"name": "say", "arguments": {}, "text": "hello"}
LIMIT_S = 20.0


def request_for(group="g", sample=0, *, run="r"):
    return Create(
        run=run,
        group=group,
        sample=sample,
        attempt=0,
        family="scripted",
        payload={},
        seed=1,
        reap_at_ms=SystemClock().now_ms() + 600_000,
        wait_s=5.0,
    )


class Host:
    """A host whose withdrawn samples the test says."""

    def __init__(self, **settings):
        self.withdrawn = set()
        self.factory = ScriptedFactory(**settings)
        self.host = EnvHost(self.factory, withdrawn=lambda key: (key.group, key.sample) in self.withdrawn)

    async def leases(self):
        """Return one lease of each open state."""
        created = (await self.host.create(request_for("created"))).lease
        ready = (await self.host.create(request_for("ready"))).lease
        await self.host.ready(ready)
        claimed = (await self.host.create(request_for("claimed"))).lease
        token = (await self.host.claim(claimed)).token
        await self.host.step(claimed, token, ACTION)
        return created, ready, claimed


@pytest.fixture
async def world():
    world = Host()
    yield world
    await world.host.stop()


async def test_a_sweep_closes_what_was_withdrawn_and_nothing_else(world):
    """Created, ready and claimed; a sibling's environment stays. A second sweep finds nothing."""
    created, ready, claimed = await world.leases()
    other = (await world.host.create(request_for("claimed", 1))).lease
    world.withdrawn |= {("created", 0), ("ready", 0), ("claimed", 0)}
    swept = world.host.sweep()
    await wait_until(lambda: sum(one.closes for one in world.factory.built), 3, limit_s=LIMIT_S)

    assert (3, 0) == (swept, world.host.sweep())
    for lease in (created, ready, claimed):
        assert await world.host.claim(lease) == Closed(lease=lease)
    assert {"created": 1, "ready": 0, "claimed": 0, "closed": 3} == world.host.counts().leases
    assert (await world.host.claim(other)).token == 1
    with pytest.raises(Fenced):
        await world.host.step(claimed, 1, ACTION)


async def test_an_environment_that_is_inside_a_call_is_closed_after_it():
    """A thread cannot be stopped; what the call gives has no say any more."""
    entered, leave = threading.Event(), threading.Event()

    def inside():
        entered.set()
        assert leave.wait(LIMIT_S)

    world = Host(inside=inside)
    lease = (await world.host.create(request_for())).lease
    await world.host.claim(lease)
    step = asyncio.create_task(world.host.step(lease, 1, ACTION))
    assert await asyncio.to_thread(entered.wait, LIMIT_S)
    world.withdrawn.add(("g", 0))
    world.host.sweep()
    await settle()
    before = world.factory.built[0].closes
    leave.set()

    with pytest.raises(Fenced):
        await step
    await wait_until(lambda: world.factory.built[0].closes, 1, limit_s=LIMIT_S)
    assert before == 0
    await world.host.stop()


async def test_a_sample_that_is_withdrawn_while_its_environment_is_built_gets_none():
    """Whoever waits for it is told that there is nothing to do."""
    building, go_on = threading.Event(), threading.Event()
    world = Host()
    factory = world.host._factory

    def slow(*arguments):
        building.set()
        assert go_on.wait(LIMIT_S)
        return factory(*arguments)

    world.host._factory = slow
    creating = asyncio.create_task(world.host.create(request_for()))
    assert await asyncio.to_thread(building.wait, LIMIT_S)
    world.withdrawn.add(("g", 0))
    world.host.sweep()
    go_on.set()
    answer = await creating
    await wait_until(lambda: -world.host.counts().environments, 0, limit_s=LIMIT_S)

    assert isinstance(answer, Closed)
    assert [1] == [environment.closes for environment in world.factory.built]
    await world.host.stop()


async def test_a_claim_that_waits_for_the_environment_is_fenced_by_a_withdrawal():
    """A second worker claims while the first one's step is in a thread; then the sample is withdrawn."""
    entered, leave = threading.Event(), threading.Event()

    def inside():
        entered.set()
        assert leave.wait(LIMIT_S)

    world = Host(inside=inside)
    lease = (await world.host.create(request_for())).lease
    await world.host.claim(lease)
    step = asyncio.create_task(world.host.step(lease, 1, ACTION))
    assert await asyncio.to_thread(entered.wait, LIMIT_S)
    claim = asyncio.create_task(world.host.claim(lease))
    await settle()
    withdrawing = asyncio.create_task(world.host.withdraw(lease))
    await settle()
    leave.set()
    answers = await asyncio.gather(step, claim, withdrawing, return_exceptions=True)

    assert [Fenced, Fenced, type(None)] == [type(answer) for answer in answers]
    assert [1] == [environment.closes for environment in world.factory.built]
    await world.host.stop()


async def test_the_service_closes_environments_as_soon_as_control_says_so(tmp_path):
    """It follows the log by itself; no worker has to come by."""
    bus = MemoryBus(VirtualClock())
    await bus.create_topics(TABLE)
    factory, stop, listens = ScriptedFactory(), asyncio.Event(), asyncio.Event()
    address = f"unix:{tmp_path}/host.sock"
    cancellation = Cancellation(bus, bus.clock)
    client = HttpEnvHost(address)
    async with cancellation.following_on():
        serving = asyncio.create_task(
            serve(address, factory, stop=stop, started=lambda _: listens.set(), cancellation=cancellation)
        )
        await asyncio.wait_for(listens.wait(), LIMIT_S)
        mine = await client.create(request_for("mine"))
        other = await client.create(request_for("other"))
        await Publisher(bus, bus.clock, "test").publish(CONTROL, Cancel(target="r/mine", cause="by request"))
        await wait_until(lambda: factory.built[0].closes, 1, limit_s=LIMIT_S)

        assert await client.claim(mine.lease) == Closed(lease=mine.lease)
        assert await client.create(request_for("mine", 1)) == Closed(lease="")
        assert (await client.claim(other.lease)).token == 1
        assert isinstance(await client.create(request_for("mine", run="r2")), Created)
        stop.set()
        await asyncio.wait_for(serving, LIMIT_S)
        await client.disconnect()
