"""`rollmill train` on a real Kafka, killed with -9 and gone on with: it decides and learns what an unkilled one does.

The unkilled one works on a log in memory, in this process; both logs get the same records, in two halves. The second
half comes once the process is dead, so there is always something left that it has not decided.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path

import pytest

from infra.clock import SystemClock
from infra.kafka import KafkaBus
from rollmill.commands.train import run_toml_of
from schemas.decisions import Branch
from schemas.topics import TABLE
from tests.logs import wait_until
from tests.pipeline.synthetic_run import (
    RUN,
    decisions,
    learned,
    memory_bus,
    record_trajectories,
    run_config,
    small_model,
    told,
)
from trainer import loop
from trainer.config import load_config
from trainer.decision_log import decisions_of
from trainer.diff import diff
from trainer.fork import RUN_FILE, fork
from trainer.replay import replay

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()
LIMIT_S = 300.0
"""Longest wait for a trainer's process, seconds: torch alone may take a minute to load on a machine that is busy."""

HALF, ALL = 20, 52
"""Groups of the first half, and of both: the first is enough for six steps, and not for the last one."""

STEPS, NEW = 12, "new"


def drawn(kind, most):
    """Return after how many decisions a process is killed: some counts up to the most that it can have made."""
    return random.Random(kind).sample(range(1, most + 1), 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the directory of a small model."""
    directory = tmp_path_factory.mktemp("model") / "m"
    small_model(directory)
    return directory


@pytest.fixture
async def command(kafka, tmp_path, model):
    """Give the command with topics of its own."""
    prefix = f"{tmp_path.name}."
    bus = KafkaBus(kafka, prefix=prefix)
    await bus.start()
    await bus.create_topics(TABLE)
    (tmp_path / "killed").mkdir()
    config = run_config(tmp_path / "killed", model, stop={"max_steps": STEPS})
    path = tmp_path / "RUN.toml"
    path.write_text(run_toml_of(config))
    yield Command(bus, config, path, (f"bus.bootstrap={kafka}", f"bus.prefix={prefix}"))
    await bus.close()


class Command:
    """`rollmill train` with one RUN.toml on one log."""

    def __init__(self, bus, config, path, settings):
        self.bus, self.config, self.path = bus, config, path
        self._settings = settings

    async def start(self, *options, path=None):
        """Start a process."""
        argv = [sys.executable, "-m", "rollmill", "train", str(path or self.path), *options]
        argv += [part for setting in self._settings for part in ("--set", setting)]
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=pipe, stderr=pipe)

    async def to_the_end(self, *options, path=None):
        """Let a process train to the run's end."""
        await ended(await self.start(*options, path=path), code=0)

    async def started(self, run=RUN):
        """Wait for a run's first trainer: what is recorded from now on belongs to the run."""
        await self.until_decided(1, run)

    async def decided(self, run=RUN):
        """Return how many decisions of a run are in the log."""
        return len(await decisions(self.bus, run))

    async def until_decided(self, count, run=RUN, process=None):
        """Wait for so many decisions of a run, or until the process that makes them is no more."""
        reader = await self.bus.read({decisions_of(run): 0})
        try:
            async with asyncio.timeout(LIMIT_S):
                while await self.decided(run) < count and (process is None or process.returncode is None):
                    await reader.poll(500, 0.5)  # a process that loads torch beside us needs the time more than we do
        finally:
            await reader.close()

    async def kill(self, process, count, run=RUN):
        """Kill a process with the so many-th decision of a run; it has more to do than it can have done."""
        try:
            await self.until_decided(count, run, process)
        finally:
            if process.returncode is None:
                process.kill()
        await ended(process, code=-signal.SIGKILL)


async def ended(process, *, code):
    """Wait until a process has ended with a code."""
    try:
        out, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == code, (out + errors).decode()


async def train(config, bus, **options):
    """Train where nobody is killed."""
    async with asyncio.timeout(LIMIT_S):
        return await loop.run(config, bus, CLOCK, **options)


async def first_half(bus, run=RUN):
    await record_trajectories(bus, groups=HALF, seed=3, run=run)


async def second_half(bus, run=RUN):
    await record_trajectories(bus, groups=ALL, begin=HALF, seed=3, run=run)


async def assert_same(killed, config, calm, calm_config):
    """Both runs decided the same and have the same weights, and the killed one's log holds what its decisions say."""
    run = config.run
    assert told(await decisions(killed, run)) == told(await decisions(calm, run))
    # Not the optimizer's file: it holds the state of torch's random numbers, of which this process has drawn some.
    assert learned(config)[:3] == learned(calm_config)[:3]
    assert (await replay(killed, CLOCK, run)).all_equal
    assert (await diff(killed, CLOCK, run, run)).empty


@pytest.mark.parametrize(
    "count", [pytest.param(count, marks=pytest.mark.slow if at else ()) for at, count in enumerate(drawn("resume", 12))]
)
async def test_a_resumed_run_goes_on_as_if_nobody_had_killed_it(command, tmp_path, model, count):
    """`--resume` in a process of its own, over what the dead one left."""
    process = await command.start()
    await command.started()
    await first_half(command.bus)
    await command.kill(process, count)
    await second_half(command.bus)
    await command.to_the_end("--resume")

    calm, config = await memory_bus(), run_config(tmp_path, model, "calm", stop={"max_steps": STEPS})
    await first_half(calm)
    await second_half(calm)
    await train(config, calm)
    await assert_same(command.bus, command.config, calm, config)


@pytest.mark.slow
@pytest.mark.parametrize("count", drawn("rollback", 7))
async def test_a_rolled_back_run_goes_on_as_if_nobody_had_killed_it(command, tmp_path, model, count):
    """`--rollback` is given again only if the log does not know of it yet."""
    process = await command.start("--run-set", "stop.max_steps=4")
    await command.started()
    await first_half(command.bus)
    await ended(process, code=0)
    before = await command.decided()
    await command.kill(await command.start("--rollback", "2"), before + count)
    await second_half(command.bus)
    branched = any(isinstance(decision, Branch) for _, decision in await decisions(command.bus))
    await command.to_the_end(*(["--resume"] if branched else ["--rollback", "2"]))

    calm, config = await memory_bus(), run_config(tmp_path, model, "calm", stop={"max_steps": STEPS})
    await first_half(calm)
    await second_half(calm)
    await train(run_config(tmp_path, model, "calm", stop={"max_steps": 4}), calm)
    await train(config, calm, rollback=2)
    await assert_same(command.bus, command.config, calm, config)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, *drawn("fork", 7)])
async def test_a_fork_goes_on_as_if_nobody_had_killed_it(command, tmp_path, model, count):
    """Killed while its directory is made, too: `--fork` is given again unless that is there, whole."""
    process = await command.start("--run-set", "stop.max_steps=2")
    await command.started()
    await first_half(command.bus)
    await ended(process, code=0)
    forked = command.config.directory.with_name(NEW) / RUN_FILE
    process = await command.start("--fork", NEW)
    if count:
        await command.started(NEW)
        await first_half(command.bus, NEW)
        await command.kill(process, count, NEW)
        await second_half(command.bus, NEW)
        await command.to_the_end("--resume", path=forked)
    else:
        await wait_until(lambda: any(forked.parent.parent.glob(f"*{NEW}*")), True, limit_s=LIMIT_S)
        await command.kill(process, 0, NEW)
        again = ("--resume",) if forked.exists() else ("--fork", NEW)
        process = await command.start(*again, path=forked if forked.exists() else None)
        await command.started(NEW)
        await first_half(command.bus, NEW)
        await second_half(command.bus, NEW)
        await ended(process, code=0)

    calm, config = await memory_bus(), run_config(tmp_path, model, "calm", stop={"max_steps": 2})
    await first_half(calm)
    await train(config, calm)
    whole = run_config(tmp_path, model, "calm", stop={"max_steps": STEPS})
    other = await fork(whole, NEW, calm, CLOCK, run_toml_of)
    await first_half(calm, NEW)
    await second_half(calm, NEW)
    await train(other, calm)
    await assert_same(command.bus, load_config(forked), calm, other)
