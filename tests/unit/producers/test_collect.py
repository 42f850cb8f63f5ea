"""The outcomes of a run that nobody trains on, each sample once, in log order."""

from __future__ import annotations

import asyncio

import pytest

from infra.clock import settle
from infra.errors import WaitTimeout
from infra.wire import Publisher
from producers.collect import outcomes
from schemas.control import RunManifest
from schemas.messages import Trajectory
from schemas.outcome import Completed, Expired
from schemas.partition import partition_for
from schemas.topics import TRAJECTORIES
from tests.logs import make_task

MANIFEST = RunManifest(run="r", seed=0, samples=1)
PARTITION = partition_for("r", TRAJECTORIES.partitions)
NEIGHBOUR = next(name for name in map(str, range(100)) if partition_for(name, TRAJECTORIES.partitions) == PARTITION)
DONE = Completed(components={}, reward=1.0, success=1.0, truncated=False)


@pytest.fixture
def end(bus, clock):
    """Publish the end of a sample."""
    publisher = Publisher(bus, clock, "test")

    async def end(number, outcome=DONE, **changes):
        task = make_task(**{"run": "r", "group": f"g{number}", **changes})
        await publisher.publish(TRAJECTORIES, Trajectory(task=task, outcome=outcome, stage="eval"))

    return end


async def test_each_sample_is_counted_once_by_its_first_record(bus, clock, end):
    """Later records are superseded, other runs and unreadable bytes are passed over."""
    await end(1)
    await bus.publish(TRAJECTORIES.name, b"\xc1", partition=PARTITION)
    await end(1, Expired(cause="too late to matter"))
    await end(9, run=NEIGHBOUR)
    await end(2, Expired(cause="it counts"))
    await end(2)
    found = await outcomes(bus, clock, MANIFEST, 2, limit_s=5)

    assert [("g1", DONE), ("g2", Expired(cause="it counts"))] == [(t.task.group, t.outcome) for t in found]


async def test_a_record_of_another_task_under_the_same_id_is_ignored(bus, clock, end):
    """The digest tells; it is no outcome of ours."""
    await end(1)
    await end(1, payload={"other": True}, sample=1)
    await end(2)

    assert ["g1", "g2"] == [t.task.group for t in await outcomes(bus, clock, MANIFEST, 2, limit_s=5)]


async def test_a_run_is_read_from_where_it_began(bus, clock, end):
    """An earlier run of the same name is another's business."""
    await end(1)
    await end(2)
    manifest = RunManifest(run="r", seed=0, samples=1, trajectories_start=1)

    assert ["g2"] == [t.task.group for t in await outcomes(bus, clock, manifest, 1, limit_s=5)]


async def test_outcomes_are_waited_for_and_counted_on_the_way(bus, clock, end):
    """Progress is told at each poll."""
    seen = []
    running = asyncio.create_task(outcomes(bus, clock, MANIFEST, 2, limit_s=60, on_progress=seen.append))
    await settle()
    await end(1)
    await settle()
    await end(2)

    assert len(await asyncio.wait_for(running, 5)) == 2
    assert [1, 2] == sorted(set(seen) - {0})


async def test_a_run_that_does_not_end_is_given_up_with_a_count(bus, clock, end):
    """The error says how many came and where to look."""
    await end(1)
    running = asyncio.create_task(outcomes(bus, clock, MANIFEST, 3, limit_s=60))
    await settle()
    for _ in range(70):
        await clock.advance(1)

    with pytest.raises(WaitTimeout, match="waited 60 s for 3 outcomes of run 'r', 1 came; `rollmill status`"):
        await asyncio.wait_for(running, 5)
