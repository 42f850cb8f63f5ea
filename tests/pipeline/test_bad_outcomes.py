"""A terminal record that cannot count as what it says: everybody ends its sample in the same way."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest

from infra.clickhouse import rows
from infra.clock import VirtualClock
from infra.memory import MemoryBus
from infra.middleware.deadline import GRACE_S
from infra.trajectories import TrajectoryReader
from infra.wire import Publisher, unpack
from producers.reaper import Reaper
from schemas.dispositions import Disposition, dispositions
from schemas.messages import Budgets, Trajectory
from schemas.outcome import Failed
from schemas.topics import TABLE, TASKS, TRAJECTORIES
from schemas.transcript import pack_logprobs
from tests.golden.samples import SAMPLES, TRANSCRIPT
from tests.logs import make_task, read_all
from trainer.terminal import terminal

GRADED = SAMPLES["rollmill.trajectory"]
NAN = msgspec.structs.replace(TRANSCRIPT, logprobs=pack_logprobs([0, 0, 0, math.nan, -1, -1, 0, -1, -1]))
ABOVE = msgspec.structs.replace(TRANSCRIPT, logprobs=pack_logprobs([0, 0, 0, 0.5, -1, -1, 0, -1, -1]))

BUDGETS = Budgets(init_s=1, run_s=1, eval_s=1)

BAD = {
    "reward": {"outcome": msgspec.structs.replace(GRADED.outcome, reward=math.nan)},
    "success": {"outcome": msgspec.structs.replace(GRADED.outcome, success=2.0)},
    "nan log-prob": {"transcript": NAN},
    "positive log-prob": {"transcript": ABOVE},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
async def test_trainer_sink_reader_reaper_and_check_agree_on_what_cannot_count(changes):
    """Failed, with the cause, and nobody writes a second end."""
    clock = VirtualClock()
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    publisher = Publisher(bus, clock, "stranger")
    task = make_task(run="r", start_by_ms=clock.now_ms() + 1000, budgets=BUDGETS)
    await publisher.publish(TASKS, task)
    await publisher.publish(TRAJECTORIES, msgspec.structs.replace(GRADED, task=task, **changes))

    (record,) = await read_all(bus, TRAJECTORIES)
    received = await unpack(TRAJECTORIES, record)
    (row,) = rows.trajectory_rows(received)["trajectories"]
    stored = dict(zip(rows.TRAJECTORIES.columns, row, strict=True))
    async with TrajectoryReader.on(bus, clock, "r", start=0) as reader:
        (group,) = [group async for group in reader.groups(follow=False)]
    ends = {(task.group, task.sample): (record.offset, received.message.outcome)}
    ledger = dispositions(ends, ends, [], has_trainer=True)

    assert not terminal(received, None).completed
    assert ("failed", 0.0, 0.0) == (stored["outcome"], stored["reward"], stored["success"])
    assert "its" in stored["cause"]
    assert (0, [Failed]) == (len(group.graded), [type(sample.outcome) for sample in group.failed])
    assert [Disposition.FAILED] == list(ledger.places.values())
    assert await reaped(bus, clock) == []


async def reaped(bus, clock) -> list[Trajectory]:
    """Return what a reaper adds once every deadline has passed."""
    reaper = asyncio.create_task(Reaper(bus, clock).run())
    other = make_task(run="r", group="other", start_by_ms=clock.now_ms() + 1000, budgets=BUDGETS)
    await Publisher(bus, clock, "stranger").publish(TASKS, other)
    try:
        async with asyncio.timeout(60):
            while len(await read_all(bus, TRAJECTORIES)) < 2:
                await clock.advance(GRACE_S / 4)
    finally:
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)
    found = [(await unpack(TRAJECTORIES, record)).message for record in await read_all(bus, TRAJECTORIES)]
    return [one for one in found[1:] if one.task.group != "other"]
