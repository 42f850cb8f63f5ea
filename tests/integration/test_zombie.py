"""A worker that stood still while its partitions moved: what it brings late counts for nothing, and it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from infra.clock import SystemClock
from infra.kafka import KafkaBus
from infra.trajectories import TrajectoryReader
from infra.wire import Publisher, unpack
from schemas.topics import ROLLOUTS, TABLE, TRAJECTORIES
from tests.golden.samples import SAMPLES
from tests.logs import FAR_MS, read_all, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()
PREFIX, RUN = "zombie.", "z"
HELD, MORE = range(4), range(4, 10)
MOVE_S = 90.0
"""Longest wait for partitions to move: a session of 6 s, and a machine that is busy."""


@pytest.fixture
async def bus(kafka):
    bus = KafkaBus(kafka, prefix=PREFIX)
    await bus.start()
    await bus.create_topics(TABLE)
    yield bus
    await bus.close()


async def publish(bus, samples, folder):
    """Publish finished episodes that wait for their grade."""
    rollout = SAMPLES["rollmill.rollout"]
    for sample in samples:
        task = msgspec.structs.replace(
            rollout.task, run=RUN, group="g", sample=sample, samples=len(HELD) + len(MORE), start_by_ms=FAR_MS
        )
        made = msgspec.structs.replace(rollout, task=task, verdict={"folder": str(folder)})
        await Publisher(bus, CLOCK, "test").publish(ROLLOUTS, made)


async def trajectories(bus):
    """Return (sample, process that wrote it) of every terminal record, in log order."""
    found = [(await unpack(TRAJECTORIES, record)).message for record in await read_all(bus, TRAJECTORIES)]
    return [(one.task.sample, int(one.backend)) for one in found]


async def written_by(bus, process):
    """Return the samples of the terminal records that a process wrote."""
    return {sample for sample, writer in await trajectories(bus) if writer == process.pid}


async def committed(bus):
    """Return how many records of the stage are done with for its group."""
    begin = await bus.begin_offsets(ROLLOUTS.name)
    return sum(done.offset - begin[part] for part, done in (await bus.committed("eval", ROLLOUTS.name)).items())


async def start(kafka):
    settings = [f"bus.bootstrap={kafka}", f"bus.prefix={PREFIX}", "bus.session_timeout_s=6"]
    argv = [sys.executable, "-m", "tests.integration.zombie", *(f"--set={setting}" for setting in settings)]
    return await asyncio.create_subprocess_exec(*argv, cwd=ROOT)


async def test_a_stopped_worker_that_wakes_up_after_its_partitions_moved_harms_nothing(bus, kafka, tmp_path):
    """SIGSTOP in the middle of work, another worker does it, SIGCONT: late output is superseded and not committed."""
    workers = [await start(kafka)]

    async def late():
        return len(await written_by(bus, workers[0]))

    try:
        zombie = workers[0]
        hold = tmp_path / f"hold-{zombie.pid}"
        hold.touch()
        await publish(bus, HELD, tmp_path)
        await wait_until(lambda: len(list(tmp_path.glob(f"started-{zombie.pid}-*"))), len(HELD), limit_s=MOVE_S)
        os.kill(zombie.pid, signal.SIGSTOP)
        workers.append(await start(kafka))
        heir = workers[1]
        await wait_until(lambda: written_by(bus, heir), set(HELD), limit_s=MOVE_S)
        await wait_until(lambda: committed(bus), len(HELD), limit_s=MOVE_S)
        hold.unlink()
        os.kill(zombie.pid, signal.SIGCONT)
        await wait_until(late, 1, limit_s=MOVE_S)
        after = await committed(bus)

        heir.terminate()
        assert await asyncio.wait_for(heir.wait(), MOVE_S) == 0
        await publish(bus, MORE, tmp_path)
        await wait_until(lambda: written_by(bus, zombie), set(MORE), limit_s=MOVE_S)
        await wait_until(lambda: committed(bus), len(HELD) + len(MORE), limit_s=MOVE_S)
        zombie.terminate()
        assert await asyncio.wait_for(zombie.wait(), MOVE_S) == 0
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()  # also one that stands still
                await worker.wait()
    found = await trajectories(bus)
    async with TrajectoryReader.on(bus, CLOCK, RUN) as reader:
        outcomes = [(one.task.sample, int(one.backend)) async for one in reader.accepted(follow=False)]

        assert {(sample, heir.pid) for sample in HELD} | {(sample, zombie.pid) for sample in MORE} == set(outcomes)
        assert len(outcomes) == len(HELD) + len(MORE)
        assert reader.superseded == len(found) - len(outcomes) >= 1
    assert len(HELD) == after
