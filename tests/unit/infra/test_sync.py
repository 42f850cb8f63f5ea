"""The weights that a trainer announced come into the engine, and stay out when they are older."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from infra.clock import VirtualClock, settle
from infra.control import ControlView
from infra.errors import BusError
from infra.inference.base import ModelPathMissing, PolicyRefused, PolicyUnreachable, Weights
from infra.inference.scripted import ScriptedPolicy
from infra.inference.sync import AGAIN_S, LOOK_EVERY_S, EngineTaken, WeightSync
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from schemas.control import Cancel, Credit, PolicyVersion
from schemas.topics import CONTROL, METRICS, TABLE
from schemas.transcript import Sampling
from tests.logs import read_all


class Engine(ScriptedPolicy):
    """The scripted twin, which may refuse a load or lose an answer."""

    def __init__(self, clock):
        super().__init__(lambda prompt, seed: [5, 6], clock=clock)
        self.trouble = {}
        self.heard = []

    async def _hear(self, call):
        self.heard.append(call)
        for error in self.trouble.get(call, [])[:1]:
            self.trouble[call].pop(0)
            raise error

    async def pause(self, mode="keep"):
        await super().pause(mode)
        await self._hear("pause")

    async def resume(self):
        await super().resume()
        await self._hear("resume")

    async def load(self, directory, version, run=""):
        await self._hear("load")
        await super().load(directory, version, run)

    async def version(self):
        return (await self.info()).version

    async def samples(self):
        """Tell whether a generation goes on."""
        asking = self.generate(np.array([1], np.int32), Sampling(), seed=0, request_id="r", stop_token_ids=(6,))
        running = asyncio.ensure_future(asking)
        await settle()
        done = running.done()
        running.cancel()
        return done


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
async def bus(clock):
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    return bus


@pytest.fixture
def engine(clock):
    return Engine(clock)


@pytest.fixture
def announce(bus, clock, tmp_path):
    """Announce a version as a trainer does, with its directory."""

    async def announce(version, *, epoch=0, run="r", exists=True):
        directory = tmp_path / f"v{version}"
        if exists:
            directory.mkdir(exist_ok=True)
        message = PolicyVersion(run=run, epoch=epoch, version=version, directory=str(directory), digest="d")
        await Publisher(bus, clock, "trainer").publish(CONTROL, message)
        await settle()
        return directory

    return announce


@asynccontextmanager
async def begun(bus, clock, engine, **options):
    """Run a synchronisation while the block runs; gives its task."""
    control = ControlView(bus, clock)
    async with control.following():
        sync = WeightSync(control, engine, clock, Publisher(bus, clock, "policy"), **{"run": "r", **options})
        running = asyncio.create_task(sync.run())
        await settle()
        yield running
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def syncing(bus, clock, engine, **options):
    """Run a synchronisation while the block runs; it must outlive it."""
    async with begun(bus, clock, engine, **options) as running:
        yield
        assert not running.done(), running


async def test_an_announced_version_is_loaded_under_a_pause_that_ends(bus, clock, engine, announce):
    """Pause, load, resume; what it took is a metric of the version."""
    async with syncing(bus, clock, engine):
        directory = await announce(1)

        assert ["pause", "load", "resume"] == engine.heard
        assert [(directory, 1)] == engine.loaded
        assert await engine.samples()
        (record,) = await read_all(bus, METRICS)
        (point,) = (await unpack(METRICS, record)).message.points
        assert ("policy.handover_s", 1) == (point.name, point.step)


async def test_what_was_announced_before_the_start_is_loaded(bus, clock, engine, announce):
    """The latest one alone."""
    await announce(1)
    await announce(2)
    async with syncing(bus, clock, engine):
        assert [2] == [version for _, version in engine.loaded]


async def test_an_older_record_changes_nothing(bus, clock, engine, announce):
    """A lower epoch or version: an old trainer that wakes up."""
    async with syncing(bus, clock, engine):
        await announce(3, epoch=5)
        await announce(9, epoch=4)
        await announce(2, epoch=5)
        await clock.advance(2 * LOOK_EVERY_S)

        assert [3] == [version for _, version in engine.loaded]


async def test_another_runs_weights_are_not_ours(bus, clock, engine, announce):
    """One engine serves one run."""
    async with syncing(bus, clock, engine):
        await announce(1, run="other")

        assert [] == engine.loaded


async def test_the_engine_of_a_run_that_trains_is_left_alone(bus, clock, engine, announce):
    """A second synchronisation by mistake ends with an error that says what to do; the first one notices nothing."""
    await announce(1)
    await announce(1, run="late")
    async with syncing(bus, clock, engine), begun(bus, clock, engine, run="late") as second:
        with pytest.raises(
            EngineTaken,
            match="version 1 of run r, whose trainer has not closed it: wait for its end, or cancel it, or take",
        ):
            await second
        await clock.advance(2 * LOOK_EVERY_S)

        assert [Weights(1, "r")] == [(await engine.info()).weights]
        assert ["pause", "load", "resume"] == engine.heard


async def test_the_engine_of_a_run_that_has_ended_is_free(bus, clock, engine, announce):
    """Its trainer said in its last credit that it wants no more groups."""
    await announce(8)
    async with syncing(bus, clock, engine):
        pass
    last = Credit(run="r", epoch=0, admit_up_to=1, min_version=0, horizon=1, temperature=1.0, closed=True)
    await Publisher(bus, clock, "trainer").publish(CONTROL, last)
    await announce(0, run="next")
    async with syncing(bus, clock, engine, run="next"):
        assert (await engine.info()).weights == Weights(0, "next")


async def test_the_engine_of_a_cancelled_run_is_free(bus, clock, engine, announce):
    """Its trainer may never have said that it ends."""
    await announce(8)
    async with syncing(bus, clock, engine):
        pass
    await Publisher(bus, clock, "cancel").publish(CONTROL, Cancel(target="r", cause="given up"))
    await announce(0, run="next")
    async with syncing(bus, clock, engine, run="next"):
        assert (await engine.info()).weights == Weights(0, "next")


async def test_an_engine_that_restarted_at_the_first_version_gets_the_runs_own(bus, clock, engine, announce):
    """The model that it was started with is version 0 too, and need not be the run's."""
    async with syncing(bus, clock, engine):
        await announce(0)
        engine._weights = Weights()
        await clock.advance(LOOK_EVERY_S)

        assert (await engine.info()).weights == Weights(0, "r")


async def test_a_synchronisation_that_is_ended_in_a_load_ends(bus, clock, engine, announce):
    """Whatever the engine answers to the end of the pause."""
    loading = asyncio.Event()

    async def load(directory, version, run=""):
        loading.set()
        await asyncio.Event().wait()

    engine.load = load
    engine.trouble["resume"] = [PolicyRefused("weights were loaded and have no version yet")]
    async with begun(bus, clock, engine) as running:
        await announce(1)
        await asyncio.wait_for(loading.wait(), 5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 5)


async def test_a_version_that_is_announced_during_a_load_is_loaded_at_once(bus, clock, engine, announce):
    """Not when the engine is looked at again."""
    load = engine.load

    async def slow(directory, version, run=""):
        if version == 1:
            await announce(2)
        await load(directory, version, run)

    engine.load = slow
    async with syncing(bus, clock, engine):
        await announce(1)
        await settle()

        assert [1, 2] == [version for _, version in engine.loaded]


async def test_an_engine_may_be_taken_and_whoever_had_it_ends(bus, clock, engine, announce):
    """They never load in turns: the one that was there finds out and says who has it now."""
    await announce(3)
    await announce(1, run="next")
    async with begun(bus, clock, engine) as first, syncing(bus, clock, engine, run="next", take=True):
        await clock.advance(LOOK_EVERY_S)
        with pytest.raises(EngineTaken, match="run r had this engine, and now the engine has version 1 of run next"):
            await first
        await clock.advance(2 * LOOK_EVERY_S)

        assert (await engine.info()).weights == Weights(1, "next")


async def test_a_new_trainer_may_go_back_to_a_version(bus, clock, engine, announce):
    """A higher epoch counts, whatever its number: it resumed from a checkpoint."""
    async with syncing(bus, clock, engine):
        await announce(3, epoch=1)
        await announce(2, epoch=2)

        assert [3, 2] == [version for _, version in engine.loaded]


async def test_a_load_that_fails_is_tried_again_and_the_engine_samples_meanwhile(bus, clock, engine, announce):
    """The engine keeps the weights it has; the pause ends either way."""
    engine.trouble["load"] = [ModelPathMissing("not there yet"), PolicyUnreachable("gone")]
    async with syncing(bus, clock, engine):
        await announce(1)
        assert (0, True) == (await engine.version(), await engine.samples())
        await clock.advance(AGAIN_S)
        assert (0, True) == (await engine.version(), await engine.samples())
        await clock.advance(AGAIN_S)

        assert (1, True) == (await engine.version(), await engine.samples())
        assert ["pause", "load", "resume"] * 3 == engine.heard


async def test_a_directory_that_comes_late_is_loaded_when_it_is_there(bus, clock, engine, announce):
    """As on a shared file system that shows files after a while."""
    async with syncing(bus, clock, engine):
        directory = await announce(1, exists=False)
        await clock.advance(AGAIN_S)
        directory.mkdir()
        await clock.advance(AGAIN_S)

        assert await engine.version() == 1


async def test_a_pause_whose_answer_was_lost_is_ended_too(bus, clock, engine, announce):
    """The engine may have taken it: nobody may stay paused."""
    engine.trouble["pause"] = [PolicyUnreachable("gone")]
    async with syncing(bus, clock, engine):
        await announce(1)
        assert ["pause", "resume"] == engine.heard
        assert await engine.samples()
        await clock.advance(AGAIN_S)

        assert await engine.version() == 1


async def test_an_engine_that_restarted_gets_its_weights_again_without_news(bus, clock, engine, announce):
    """It is looked at regularly."""
    async with syncing(bus, clock, engine):
        await announce(4)
        engine._weights = Weights()
        await clock.advance(LOOK_EVERY_S)

        assert await engine.version() == 4


async def test_a_metric_that_is_not_published_stops_nothing(clock, engine, announce, bus):
    """Losing some never changes what is trained on."""
    publish = bus.publish

    async def refusing(topic, value, **where):
        if topic == METRICS.name:
            raise BusError("full")
        return await publish(topic, value, **where)

    bus.publish = refusing
    async with syncing(bus, clock, engine):
        await announce(1)
        await announce(2)

        assert [1, 2] == [version for _, version in engine.loaded]
