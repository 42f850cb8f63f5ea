"""A run's weights come into every engine that is registered for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from infra.clock import VirtualClock, settle
from infra.control import ControlView
from infra.inference.base import PolicyUnreachable, Weights
from infra.inference.scripted import ScriptedPolicy
from infra.inference.sync import AGAIN_S, LOOK_EVERY_S, EngineTaken
from infra.inference.sync_pool import PoolSync
from infra.memory import MemoryBus
from infra.wire import Publisher
from schemas.control import Backend, Cancel, PolicyVersion, control_key
from schemas.topics import CONTROL, TABLE
from tests.pools import address_of, backends_of

LOAD_S = 4.0


class Engine(ScriptedPolicy):
    """The scripted twin, whose loads take time."""

    def __init__(self, clock):
        super().__init__(lambda prompt, seed: [5], clock=clock)
        self.away = False
        self.loading = 0

    async def load(self, directory, version, run=""):
        if self.away:
            raise PolicyUnreachable("refused")
        self.loading += 1
        await self._clock.sleep(LOAD_S)
        self.loading -= 1
        await super().load(directory, version, run)

    async def weights(self):
        return (await self.info()).weights


class World:
    """A log, a trainer that announces, and engines by name."""

    def __init__(self, bus, clock, directory):
        self.bus, self.clock, self.directory = bus, clock, directory
        self.engines = {name: Engine(clock) for name in "ab"}
        self.opened = []

    def connect(self, url):
        self.opened.append(url)
        return self.engines[url.removeprefix("http://")]

    async def write(self, message):
        await Publisher(self.bus, self.clock, "test").publish(CONTROL, message)
        await settle()

    async def register(self, *names):
        for backend in backends_of(*names):
            await self.write(backend)

    async def remove(self, backend):
        await self.bus.publish(CONTROL.name, None, key=control_key(backend).encode(), partition=0)
        await settle()

    async def announce(self, version, run="r"):
        directory = self.directory / f"v{version}"
        directory.mkdir(exist_ok=True)
        await self.write(PolicyVersion(run=run, epoch=0, version=version, directory=str(directory), digest="d"))

    async def begins_with_the_engine_of_another(self):
        """Let run s have an engine, and then register that and another one for any run."""
        await self.announce(7, "s")
        await self.announce(1, "r")
        async with self.following("s"):
            await self.after(LOAD_S + 1)
        await self.register("a", "b")

    async def serve(self):
        return {name: await engine.weights() for name, engine in self.engines.items()}

    async def after(self, seconds):
        for _ in range(round(seconds * 2)):
            await self.clock.advance(0.5)
        await settle()

    @asynccontextmanager
    async def following(self, run="r", **options):
        """Run a synchronisation while the block runs; gives its task."""
        control = ControlView(self.bus, self.clock)
        async with control.following():
            publisher = Publisher(self.bus, self.clock, "policy")
            sync = PoolSync(control, self.connect, self.clock, publisher, run=run, url=address_of("a"), **options)
            running = asyncio.create_task(sync.run())
            await settle()
            yield running
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def world(tmp_path):
    clock = VirtualClock()
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    return World(bus, clock, tmp_path)


async def test_the_configured_engine_is_followed_until_others_are_registered(world):
    """Those that come are brought to the version of the day; one that is removed is left as it is."""
    await world.announce(1)
    async with world.following():
        await world.after(LOAD_S + 1)
        alone = await world.serve()
        await world.register("a", "b")
        await world.after(LOAD_S + 1)
        both = await world.serve()
        await world.remove(*backends_of("a"))
        await world.announce(2)
        await world.after(LOAD_S + 1)
        last = await world.serve()

    assert alone == {"a": Weights(1, "r"), "b": Weights()}
    assert both == {"a": Weights(1, "r"), "b": Weights(1, "r")}
    assert last == {"a": Weights(1, "r"), "b": Weights(2, "r")}


@pytest.mark.parametrize(("rolling", "at_once"), [(False, 2), (True, 1)])
async def test_weights_are_loaded_together_or_one_engine_after_another(world, rolling, at_once):
    """As is wanted; in the end all have them."""
    await world.register("a", "b")
    await world.announce(1)
    most = 0
    async with world.following(rolling=rolling):
        for _ in range(round(3 * LOAD_S)):
            await world.after(1)
            most = max(most, sum(engine.loading for engine in world.engines.values()))

    assert most == at_once
    assert set((await world.serve()).values()) == {Weights(1, "r")}


async def test_an_engine_that_cannot_load_holds_up_no_other(world):
    """It is tried again, and has them once it can."""
    await world.register("a", "b")
    world.engines["a"].away = True
    await world.announce(1)
    async with world.following(rolling=True):
        await world.after(2 * LOAD_S + AGAIN_S)
        first = await world.serve()
        world.engines["a"].away = False
        await world.after(LOAD_S + 2 * AGAIN_S)

    assert first == {"a": Weights(), "b": Weights(1, "r")}
    assert (await world.serve())["a"] == Weights(1, "r")


async def test_runs_that_have_engines_of_their_own_train_side_by_side(world):
    """Each engine is registered for its run."""
    await world.write(Backend(name="a", url=address_of("a"), run="r"))
    await world.write(Backend(name="b", url=address_of("b"), run="s"))
    await world.announce(1, "r")
    await world.announce(7, "s")
    async with world.following("r"), world.following("s"):
        await world.after(LOAD_S + 1)

    assert await world.serve() == {"a": Weights(1, "r"), "b": Weights(7, "s")}


async def test_an_engine_of_another_run_is_left_to_it_as_long_as_there_is_one_that_is_not(world):
    """Without any it ends, and says whose engine it is."""
    await world.begins_with_the_engine_of_another()
    async with world.following("r") as running:
        await world.after(LOAD_S + 1)
        beside = await world.serve()
        await world.remove(Backend(name="b", url=address_of("b")))
        await world.after(1)
        with pytest.raises(EngineTaken, match="version 7 of run s"):
            await running

    assert beside == {"a": Weights(7, "s"), "b": Weights(1, "r")}


async def test_an_engine_of_another_run_is_taken_once_that_run_is_over(world):
    """Nobody has to start anything again."""
    await world.begins_with_the_engine_of_another()
    async with world.following("r"):
        await world.after(LOAD_S + 1)
        await world.write(Cancel(target="s", cause="by request"))
        await world.after(LOAD_S + LOOK_EVERY_S)

    assert await world.serve() == {"a": Weights(1, "r"), "b": Weights(1, "r")}


async def test_an_engine_whose_turn_comes_late_is_given_what_is_wanted_then(world):
    """Not what was wanted when it began to wait."""
    await world.register("a", "b")
    await world.announce(1)
    async with world.following(rolling=True):
        await world.after(1)
        await world.announce(2)
        await world.after(3 * LOAD_S + 1)

    assert [version for _, version in world.engines["b"].loaded] == [2]
    assert set((await world.serve()).values()) == {Weights(2, "r")}
