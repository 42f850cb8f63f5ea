"""The live board as a process on a real Kafka: it follows, survives kills, writes nothing, and nothing needs it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from infra.board.view import Answer, SampleView
from infra.clock import SystemClock
from infra.kafka import KafkaBus
from infra.loopback import HOST, find_free
from infra.wire import Publisher
from rollmill.services import has_faust
from schemas.telemetry import EventKind, StageEvent, StageEvents
from schemas.topics import EVENTS, TABLE
from tests.logs import wait_until

pytestmark = [
    pytest.mark.integration,
    # Asked for, not imported: Faust changes the process that imports it, and the board is a process of its own.
    pytest.mark.skipif(not has_faust(), reason="Faust is not installed: the extra `board`"),
]

PREFIXES = itertools.count()
READY_S = 120.0
"""A start takes two seconds; a machine under load may take much longer."""


class Log:
    """The topics of one test, as stages write them."""

    def __init__(self, bus, prefix):
        self.bus, self.prefix = bus, prefix
        self._publisher = Publisher(bus, SystemClock(), "test")

    async def say(self, kind, sample, *, stage="run", worker="run-1@a", partition=0, **changes):
        at_ms = SystemClock().now_ms()
        event = StageEvent(run="r", group="g", sample=sample, attempt=0, stage=stage, kind=kind, at_ms=at_ms, **changes)
        await self._publisher.publish(EVENTS, StageEvents(worker=worker, events=(event,)), partition=partition)


@pytest.fixture
async def log(kafka):
    """Fresh topics on the session's Kafka."""
    prefix = f"board{os.getpid()}-{next(PREFIXES)}."
    bus = KafkaBus(kafka, prefix=prefix)
    await bus.start()
    await bus.create_topics(TABLE)
    yield Log(bus, prefix)
    await bus.close()


class Board:
    """One life of the process."""

    def __init__(self, kafka, prefix, folder, port):
        self.port = port
        argv = (sys.executable, "-m", "rollmill", "board", "--port", str(port), "--data", str(folder / "faust"))
        settings = ("--set", f"bus.bootstrap={kafka}", "--set", f"bus.prefix={prefix}")
        with (folder / "board.log").open("ab") as log:
            self.process = subprocess.Popen([*argv, *settings], stdout=log, stderr=log)

    async def get(self, path):
        """Return status and body; None while nobody listens."""
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://{HOST}:{self.port}{path}") as response:
                return response.status, await response.read()
        except aiohttp.ClientError:
            return None

    async def answer(self):
        """Return what it says once it says anything, within a limit."""

        async def ready():
            assert self.process.poll() is None, "the board ended by itself"
            found = await self.get("/board")
            return found is not None and found[0] == 200

        await wait_until(ready, True, limit_s=READY_S)
        _, body = await self.get("/board")
        return msgspec.json.decode(body, type=Answer)

    async def until(self, condition):
        """Return once the answer fulfils a condition."""

        async def fulfilled():
            return condition(await self.answer())

        await wait_until(fulfilled, True, limit_s=READY_S)

    async def end(self, number):
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, READY_S)


@asynccontextmanager
async def board(kafka, log, folder, port=None):
    running = Board(kafka, log.prefix, folder, port or find_free())
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            await asyncio.to_thread(running.process.wait, READY_S)


def summary(answer):
    """Return what does not change with time."""
    stages = {
        view.stage: (view.in_flight, view.oldest and (view.oldest.sample, view.oldest.waits_for), view.counts["1h"])
        for view in answer.board.stages
    }
    return stages, answer.board.states


async def history(log):
    """Say what a board could have missed: two samples in flight, one that waits, one that is done."""
    await log.say(EventKind.FINISHED, 3, stage="eval", partition=1)
    await log.say(EventKind.STARTED, 0)
    await log.say(EventKind.STARTED, 1, partition=1)
    await log.say(EventKind.WAITING, 0, detail="policy version >= 3")


EXPECTED = (
    {"init": (0, None, {}), "run": (2, (0, "policy version >= 3"), {"started": 2}), "eval": (0, None, {"finished": 1})},
    {"working": 2, "done": 1},
)


async def test_a_board_that_is_killed_shows_the_same_when_it_is_back_and_follows_on(kafka, log, tmp_path):
    """What was there before its start, what comes while it runs, and, after a kill -9, both."""
    await history(log)
    async with board(kafka, log, tmp_path) as first:
        assert EXPECTED == summary(await first.answer())
        await log.say(EventKind.FINISHED, 1, partition=1)
        await first.until(lambda answer: answer.board.states == {"working": 1, "queued": 1, "done": 1})
        before = summary(await first.answer())
        await first.end(signal.SIGKILL)
    async with board(kafka, log, tmp_path, first.port) as second:
        assert before == summary(await second.answer())
        await log.say(EventKind.STARTED, 0, worker="run-2@b")
        await second.until(lambda answer: answer.board.stages[1].oldest.worker == "run-2@b")
        assert await second.end(signal.SIGTERM) == 0


async def test_boards_only_read_skip_what_is_unreadable_and_see_everything_each(kafka, log, tmp_path):
    """No topic appears, no record is written; each is a group of its own, so nobody gets half of the partitions."""
    await log.bus.publish(EVENTS.name, b"\xc1", partition=0)
    await history(log)
    topics = await ours(kafka, log.prefix)
    (tmp_path / "b").mkdir()
    async with board(kafka, log, tmp_path) as one, board(kafka, log, tmp_path / "b") as other:
        for running in (one, other):
            answer = await running.answer()
            assert (EXPECTED, 1, True) == (summary(answer), answer.board.unreadable, answer.complete)
        await log.bus.publish(EVENTS.name, b"\xc1", partition=0)
        await log.bus.publish(EVENTS.name, None, key=b"k", partition=0)
        for partition in range(EVENTS.partitions):
            await log.say(EventKind.FINISHED, 10 + partition, partition=partition)
        ends = await all_ends(log.bus)
        for running in (one, other):
            await running.until(lambda answer: answer.board.unreadable == 3 and answer.board.states.get("queued") == 4)
        await sees_samples_and_nothing_else(one)

    assert (topics, ends) == (await ours(kafka, log.prefix), await all_ends(log.bus))


async def sees_samples_and_nothing_else(running):
    """One sample is asked for by its name; Faust's own pages are not served."""
    code, body = await running.get("/board/sample/r/g/0")
    found = msgspec.json.decode(body, type=SampleView)
    unknown = [await running.get(f"/board/sample/r/g/{number}") for number in ("9", "x")]
    hidden = [await running.get(f"/{page}/") for page in ("table", "router", "stats", "assignment", "performance")]

    assert (200, "working", "run", "policy version >= 3") == (code, found.state, found.stage, found.in_flight.waits_for)
    assert {404} == {code for code, _ in (*unknown, *hidden)}


async def test_a_port_that_is_taken_is_an_error_that_names_it(kafka, log, tmp_path):
    """The process ends, so that whoever supervises it tries again."""
    server = await asyncio.start_server(lambda *_: None, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    async with server, board(kafka, log, tmp_path, port) as running:
        code = await asyncio.to_thread(running.process.wait, READY_S)

    assert code == 1
    assert str(port) in (tmp_path / "board.log").read_text().splitlines()[-1]


async def ours(kafka, prefix):
    """Return the names of the test's topics on the cluster."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        return sorted(name for name in await admin.list_topics() if name.startswith(prefix))
    finally:
        await admin.close()


async def all_ends(bus):
    """Return where every topic ends."""
    return {topic.name: await bus.end_offsets(topic.name) for topic in TABLE}
