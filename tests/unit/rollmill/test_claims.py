"""Which blobs a run's records speak of, and what the commands say about the store."""

from __future__ import annotations

import asyncio
import json
import os
import random

import pytest
from click.testing import CliRunner

from infra.blobs import KEEP_MS
from infra.blobs.directory import DirectoryBlobs
from infra.claims import claimed
from infra.clock import SystemClock, VirtualClock
from infra.dead_letter import Death, bury
from infra.errors import ConfigError
from infra.memory import MemoryBus
from infra.wire import Publisher
from rollmill.claims import run_claims
from rollmill.cli import cli
from rollmill.commands.keep import pinned
from schemas.limits import INLINE_BYTES
from schemas.messages import Trajectory
from schemas.outcome import Expired
from schemas.topics import DEAD, TABLE, TASKS, TRAJECTORIES
from tests.logs import make_task, read_all

CLOCK = VirtualClock()
NOISE = random.Random(2).randbytes(INLINE_BYTES + 100)


class Log:
    """Large and small records of several runs."""

    def __init__(self):
        self.bus = MemoryBus(CLOCK)
        self._publisher = Publisher(self.bus, CLOCK, "test")

    async def task(self, run, number, *, large=True):
        """Publish a task; return the digest of its blob."""
        payload = {"value": NOISE[number:] if large else number}
        await self._publisher.publish(TASKS, make_task(run=run, payload=payload))
        return claimed((await read_all(self.bus, TASKS))[-1])

    async def foreign(self, topic, run, number):
        """Publish what another program may write: a claim check without any other header."""
        message = make_task(run=run, payload={"value": NOISE[number:]})
        if topic is TRAJECTORIES:
            message = Trajectory(task=message, outcome=Expired(cause="late"), stage="theirs")
        value, headers = await self._publisher.pack(topic, message)
        await self.bus.publish(topic.name, value, key=b"theirs", partition=0, headers=headers)
        return headers[0][1].decode()

    async def claims(self, run):
        found = await run_claims(self.bus, CLOCK, run)
        return found.records, found.digests


@pytest.fixture
async def log():
    log = Log()
    await log.bus.create_topics(TABLE)
    return log


async def test_only_the_large_values_of_the_run_are_found(log):
    """Not those of another run, also if its name begins alike; small records are counted."""
    mine = {await log.task("r", 0), await log.task("r", 1)}
    await log.task("r", 2, large=False)
    await log.task("r2", 3)

    assert (3, mine) == await log.claims("r")
    assert (0, set()) == await log.claims("nobody")


async def test_what_says_nothing_about_itself_is_opened(log):
    """A foreign producer may leave out all headers but the claim check."""
    task, trajectory = await log.foreign(TASKS, "r", 0), await log.foreign(TRAJECTORIES, "r", 1)
    await log.foreign(TASKS, "other", 2)

    assert (2, {task, trajectory}) == await log.claims("r")


async def test_dead_letters_count(log):
    """They wait to be looked at, with or without a subject, by the topic that they came from."""
    digests = {await log.task("r", 0), await log.foreign(TRAJECTORIES, "r", 1)}
    for record in [*await read_all(log.bus, TASKS), *await read_all(log.bus, TRAJECTORIES)]:
        await bury(log.bus, CLOCK, record, Death(stage="eval", cause="no"))

    assert 2 == len(await read_all(log.bus, DEAD))
    assert (4, digests) == await log.claims("r")


async def test_what_cannot_be_read_names_no_run(log):
    """A claim check for a blob that is lost, and one that is none, stop nobody from keeping the rest."""
    mine = await log.task("r", 0)
    log.bus.blobs.lose(await log.foreign(TASKS, "r", 1))
    await log.bus.publish(TASKS.name, b"\xc1", partition=1, headers=(("claim-check", b"\xff"),))
    strange = (("claim-check", b"x"), ("x-orig-topic", b"elsewhere"))
    await log.bus.publish(DEAD.name, b"\xc1", partition=1, headers=strange)

    assert (1, {mine}) == await log.claims("r")


@pytest.fixture
def rollmill(tmp_path, monkeypatch):
    """Call a command on the store of this test."""
    for name in [name for name in os.environ if name.startswith("ROLLMILL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def call(*arguments, blobs=tmp_path / "blobs"):
        done = CliRunner().invoke(cli, [*arguments, *(("--set", f"bus.blobs={blobs}") if blobs else ())])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.output

    return call


async def filled(folder):
    """A store with an old blob that is kept, one that is not, and a young one."""
    past = DirectoryBlobs(folder, VirtualClock(SystemClock().now_ms() - KEEP_MS - 1000))
    await past.create()
    await past.pin("my-run", [await past.put(b"kept")])
    await past.put(b"old")
    await DirectoryBlobs(folder, SystemClock()).put(b"young")


def test_a_person_sees_what_the_store_holds_and_collects_it(rollmill, tmp_path):
    """The status says what a collection would delete; the collection deletes that."""
    asyncio.run(filled(tmp_path / "blobs"))

    assert {
        "directory": str(tmp_path / "blobs"),
        "blobs": 3,
        "bytes": 12,
        "oldest_days": 91,
        "kept": {"my-run": 1},
        "collectable": {"blobs": 1, "bytes": 3},
    } == json.loads(rollmill("blobs", "status", "--json"))
    assert "my-run" in rollmill("blobs", "status")
    assert {"deleted": 1, "bytes": 3} == json.loads(rollmill("blobs", "collect", "--json"))
    assert "deleted 0 blobs" in rollmill("blobs", "collect")
    assert "may be collected" in rollmill("keep", "my-run", "--release")
    assert "nothing was kept" in rollmill("keep", "my-run", "--release")
    assert {"deleted": 1, "bytes": 4} == json.loads(rollmill("blobs", "collect", "--json"))


@pytest.mark.parametrize(
    "arguments", [("blobs", "status"), ("blobs", "collect"), ("keep", "r"), ("keep", "r", "--release")]
)
def test_without_a_store_the_commands_name_the_setting(rollmill, arguments):
    """Nothing is guessed: a wrong directory would look empty."""
    with pytest.raises(ConfigError, match=r"set bus\.blobs"):
        rollmill(*arguments, blobs=None)


class TestKeep:
    """`rollmill keep` beside a collection."""

    @pytest.fixture
    async def store(self, tmp_path):
        """A store with a blob that is old enough to be collected."""
        await DirectoryBlobs(tmp_path, VirtualClock(1)).create()
        self.old = await DirectoryBlobs(tmp_path, VirtualClock(1)).put(b"old")
        return DirectoryBlobs(tmp_path, SystemClock())

    async def test_what_is_said_to_be_kept_outlives_any_collection(self, store):
        """Kept first, looked for then: a collection at any moment after the word finds it kept."""
        there = await pinned(store, "r", {self.old, "0" * 64, "no digest"})
        await store.collect()

        assert {self.old} == there == {blob.digest for blob in await store.stock()}

    async def test_a_collection_that_began_before_takes_nothing_that_is_kept(self, store, monkeypatch):
        """It has not seen the pins, but looks at a blob's time before it deletes it."""
        pins_before = store._all_pins()
        there = await pinned(store, "r", {self.old})
        monkeypatch.setattr(store, "_all_pins", lambda: pins_before)
        await store.collect()

        assert {self.old} == there == {blob.digest for blob in await store.stock()}

    async def test_what_is_lost_is_not_said_to_be_kept(self, store):
        """The collection was faster."""
        await store.collect()

        assert set() == await pinned(store, "r", {self.old})
