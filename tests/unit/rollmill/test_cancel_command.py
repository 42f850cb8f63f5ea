"""`rollmill cancel`: writes one record, and says what becomes of the samples."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from click.testing import CliRunner

from infra.clock import VirtualClock
from infra.errors import ConfigError, WaitTimeout
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from producers.reaper import Reaper
from rollmill.commands import cancel as command_module
from rollmill.commands.cancel import command, withdraw
from schemas.control import Cancel, Credit, RunManifest
from schemas.messages import Trajectory
from schemas.outcome import Cancelled, Completed, Expired
from schemas.topics import CONTROL, TABLE, TASKS, TRAJECTORIES
from tests.logs import make_task, read_all

DONE = Completed(components={"a": 1.0}, reward=1.0, success=1.0, truncated=False)


class Log:
    """A log with a run of two groups of two; one sample has ended."""

    def __init__(self):
        self.clock = VirtualClock()
        self.bus = MemoryBus(self.clock)
        self._publisher = Publisher(self.bus, self.clock, "test")

    async def fill(self, *, manifest=True):
        await self.bus.create_topics(TABLE)
        if manifest:
            await self._publisher.publish(CONTROL, RunManifest(run="r", seed=1, samples=2))
        for group in ("g", "h"):
            for sample in range(2):
                await self._publisher.publish(TASKS, make_task(run="r", group=group, sample=sample, samples=2))
        await self._publisher.publish(TASKS, make_task(run="other", group="g"))
        await self.bus.publish(TASKS.name, b"\xc1 garbage", partition=0)
        await self.end("g", 0, DONE)
        return self

    async def end(self, group, sample, outcome):
        task = make_task(run="r", group=group, sample=sample, samples=2)
        await self._publisher.publish(TRAJECTORIES, Trajectory(task=task, outcome=outcome, stage="eval"))

    async def cancel(self, target, cause="by request", *, force=False, wait_s=None):
        return await withdraw(self.bus, self.clock, target, cause, force=force, wait_s=wait_s)

    async def cancels(self):
        found = [(await unpack(CONTROL, record)).message for record in await read_all(self.bus, CONTROL)]
        return [message for message in found if isinstance(message, Cancel)]


@pytest.fixture
async def log():
    return await Log().fill()


@pytest.mark.parametrize(
    ("target", "samples", "open_ones", "outcomes"),
    [("r", 4, 3, {"completed": 1}), ("r/g", 2, 1, {"completed": 1}), ("r/g/1", 1, 1, {}), ("r/h", 2, 2, {})],
)
async def test_a_cancel_is_one_record_and_says_what_it_covers(log, target, samples, open_ones, outcomes):
    """A run, a group or a sample; what ended before keeps its outcome."""
    result = await log.cancel(target, "wrong reward")

    assert [Cancel(target=target, cause="wrong reward")] == await log.cancels()
    assert (samples, open_ones, outcomes) == (result["samples"], result["open"], result["outcomes"])
    assert result["cancelled_before"] is None


async def test_saying_it_again_writes_nothing(log):
    """Nor does it for what a wider cancel covers; the first cause stands."""
    await log.cancel("r/g", "first")
    again = await log.cancel("r/g", "second")
    narrower = await log.cancel("r/g/0")

    assert [Cancel(target="r/g", cause="first")] == await log.cancels()
    assert [("first", "r/g")] * 2 == [(result["cause"], result["cancelled_before"]) for result in (again, narrower)]


async def test_a_wider_cancel_is_written_beside_a_narrower_one(log):
    """The group was cancelled, now the whole run is."""
    await log.cancel("r/g")
    await log.cancel("r")

    assert ["r/g", "r"] == [cancel.target for cancel in await log.cancels()]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nobody", "no manifest of 'nobody' and `tasks` no task of 'nobody'"),
        ("r/x", "run 'r' is known, but no task of it is 'r/x'"),
        ("r/g/7", "run 'r' is known, but no task of it is 'r/g/7'"),
        ("", "is no target"),
        ("r\n", "is no target"),
        ("r" * 2000, "is no target"),
    ],
)
async def test_what_nobody_knows_is_not_cancelled(log, target, says):
    """A misspelt name must not look like a success; the error says what was looked for and what to do."""
    with pytest.raises(ConfigError, match=says):
        await log.cancel(target)
    assert [] == await log.cancels()


async def test_force_cancels_what_is_not_there_yet(log):
    """Whatever is published under the name later."""
    result = await log.cancel("later/g", force=True)

    assert ([Cancel(target="later/g", cause="by request")], 0) == (await log.cancels(), result["samples"])


async def test_a_foreign_producers_run_is_known_by_its_tasks():
    """It wrote no manifest."""
    log = await Log().fill(manifest=False)

    assert 4 == (await log.cancel("r"))["samples"]


async def test_a_cause_is_any_text_that_a_terminal_gives(log):
    """A lone surrogate has no form on the wire, and a novel no place in a record."""
    await log.cancel("r", "\udce4" + "x" * 10_000)
    (cancel,) = await log.cancels()

    assert cancel.cause.startswith("\\udce4xxx")
    assert len(cancel.cause) == 2_000


@asynccontextmanager
async def reaping(log):
    running = asyncio.create_task(Reaper(log.bus, log.clock).run())
    yield
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def in_time(log, work):
    """Move the clock until the work has ended."""
    running = asyncio.create_task(work)
    async with asyncio.timeout(20):
        while not running.done():
            await log.clock.advance(0.25)
    return running.result()


async def test_waiting_ends_when_every_sample_has_an_outcome(log):
    """The reaper ends what is queued."""
    async with reaping(log):
        result = await in_time(log, log.cancel("r", wait_s=30))

    assert (0, {"cancelled": 3, "completed": 1}) == (result["open"], result["outcomes"])


async def test_the_first_outcome_is_the_one_that_is_counted(log):
    """As everywhere: what came later is superseded."""
    await log.end("g", 0, Cancelled(cause="late"))
    await log.end("g", 1, Expired(cause="late"))

    assert {"completed": 1, "expired": 1} == (await log.cancel("r/g", force=True))["outcomes"]


async def test_what_is_over_is_not_marked_as_cancelled(log):
    """It keeps its outcomes, so the record would only tell a lie; who means what comes later can force it."""
    await log.end("g", 1, DONE)
    with pytest.raises(
        ConfigError, match=r"every sample of 'r/g' has its outcome \(2 completed\) and keeps it.*--force"
    ):
        await log.cancel("r/g")
    assert [] == await log.cancels()

    for sample in range(2):
        await log.end("h", sample, DONE)
    with pytest.raises(ConfigError, match=r"every sample of 'r' has its outcome \(4 completed\)"):
        await log.cancel("r")
    assert [] == await log.cancels()

    await log.cancel("r", force=True)
    assert ["r"] == [cancel.target for cancel in await log.cancels()]


@pytest.mark.parametrize("closed", [None, False, True])
async def test_a_run_that_a_trainer_feeds_is_over_when_its_trainer_says_so(closed):
    """Until then it is given more tasks, although none is open at the moment."""
    log = Log()
    await log.bus.create_topics(TABLE)
    publisher = Publisher(log.bus, log.clock, "test")
    await publisher.publish(CONTROL, RunManifest(run="r", seed=1, samples=2, paced=True))
    await publisher.publish(TASKS, make_task(run="r", group="g", sample=0, samples=2))
    await log.end("g", 0, DONE)
    if closed is not None:
        credit = Credit(run="r", epoch=1, admit_up_to=1, min_version=0, horizon=1, temperature=1.0, closed=closed)
        await publisher.publish(CONTROL, credit)

    if closed:
        with pytest.raises(ConfigError, match="nothing to cancel"):
            await log.cancel("r")
    else:
        await log.cancel("r")
    assert len(await log.cancels()) == (not closed)


async def test_waiting_has_a_limit_and_says_what_is_missing(log):
    """The cancel stands all the same."""
    with pytest.raises(WaitTimeout, match=r"waited 3 s for 4 samples of 'r': 3 have no outcome.*The reaper"):
        await in_time(log, log.cancel("r", wait_s=3))

    assert 1 == len(await log.cancels())


class TestCommand:
    """As a user calls it."""

    @pytest.fixture
    def invoke(self, monkeypatch):
        log = asyncio.run(Log().fill())

        @asynccontextmanager
        async def connected(config, *, client):
            assert client == "cancel"
            yield log.bus

        monkeypatch.setattr(command_module, "connected", connected)
        return lambda *arguments: CliRunner().invoke(command, arguments)

    def test_a_person_is_told_what_will_happen(self, invoke):
        """How many are open, and what becomes of them; the second call says that it was done before."""
        first = invoke("r/g", "--cause", "wrong reward")
        second = invoke("r/g")

        assert "cancelled r/g (wrong reward): 2 samples, 1 completed" in " ".join(first.output.split())
        assert "1 are open: queued ones end as cancelled, running ones are stopped" in " ".join(first.output.split())
        assert "r/g is cancelled already, as r/g (wrong reward)" in " ".join(second.output.split())

    def test_a_program_gets_one_json_object_last(self, invoke):
        """With every figure."""
        found = json.loads(invoke("r", "--json").output.splitlines()[-1])

        assert {
            "target": "r",
            "cause": "by request",
            "cancelled_before": None,
            "samples": 4,
            "open": 3,
            "outcomes": {"completed": 1},
        } == found

    def test_an_unknown_target_is_an_error(self, invoke):
        """Of ours: one sentence, no trace."""
        assert isinstance(invoke("nobody").exception, ConfigError)
