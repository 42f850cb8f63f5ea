"""Which engines are in a pool: those on `control`, or the configured one."""

from __future__ import annotations

from infra.clock import VirtualClock, settle
from infra.inference.backends import in_pool, registered
from infra.inference.base import Need
from infra.inference.pool import PolicyPool
from infra.inference.scripted import ScriptedPolicy
from infra.memory import MemoryBus
from schemas import codec
from schemas.control import CONFIGURED, Backend, control_key
from schemas.topics import CONTROL
from tests.pools import address_of, backends_of, guards_on

CONFIGURED_URL = "http://configured"


def test_the_configured_engine_is_there_until_one_is_registered():
    """A laptop needs no command; a cluster names what it has."""
    assert [Backend(name=CONFIGURED, url=CONFIGURED_URL)] == in_pool([], CONFIGURED_URL)
    assert backends_of("a", "b") == in_pool(backends_of("b", "a"), CONFIGURED_URL)


def test_two_names_of_one_address_are_one_engine():
    """Counted twice it would be given twice its share."""
    twice = [Backend(name="b", url="http://x:1/"), Backend(name="a", url="http://x:1")]

    assert ["a"] == [backend.name for backend in in_pool(twice, CONFIGURED_URL)]


async def test_a_pool_follows_what_is_registered_drained_and_removed():
    """While it is used; in the end its connections are given up."""
    clock = VirtualClock()
    bus = MemoryBus(clock)
    await bus.create_topics([CONTROL])
    engines = {}

    def connect(url):
        engines[url] = ScriptedPolicy(lambda prompt, seed: [5], version=len(engines))
        return engines[url]

    async def write(backend, *, there=True):
        value = codec.encode(backend) if there else None
        await bus.publish(CONTROL.name, value, key=control_key(backend).encode(), partition=0)
        await settle()
        await clock.advance(1)

    pool, (a,) = PolicyPool(connect, clock, guards_on(clock)), backends_of("a")
    async with registered(pool, bus, clock, url=CONFIGURED_URL):
        versions = [(await pool.info(Need())).version]
        await write(a)
        versions.append((await pool.info(Need())).version)
        await write(a, there=False)
        versions.append((await pool.info(Need())).version)

    assert list(engines) == [CONFIGURED_URL, address_of("a")]
    assert versions == [0, 1, 2]
