"""How many records of its topics each stage has not committed yet."""

from __future__ import annotations

import pytest

from infra.bus import Committed, TopicPartition
from infra.clock import VirtualClock
from infra.memory import MemoryBus
from infra.offset_map import OffsetMap, encode
from rollmill.lag import StageLag, stage_lags
from schemas.topics import EPISODES, INIT_RETRY_5S, TABLE, TASKS


@pytest.fixture
async def bus():
    bus = MemoryBus(VirtualClock())
    await bus.create_topics(TABLE)
    return bus


async def fill(bus, topic, count, partition=0):
    for _ in range(count):
        await bus.publish(topic.name, b"x", partition=partition)


async def commit(bus, group, topic, offset, partition=0):
    member = await bus.join([topic.name], group)
    await member.commit({TopicPartition(topic.name, partition): Committed(offset)})
    await member.close()


async def lag(bus, stage):
    return next(found for found in await stage_lags(bus) if found.stage == stage)


async def test_a_stage_that_never_worked_is_behind_by_everything(bus):
    """All its topics count, the retry tiers too."""
    await fill(bus, TASKS, 3)
    await fill(bus, TASKS, 2, partition=7)
    await fill(bus, INIT_RETRY_5S, 1)

    behind = {"tasks": 5, "init.retry.5s": 1, "init.retry.30s": 0, "init.retry.5m": 0}
    assert StageLag("init", 6, behind) == await lag(bus, "init")
    assert [0, 0] == [(await lag(bus, stage)).lag for stage in ("run", "eval")]


async def test_what_a_group_committed_is_done(bus):
    """Each group has its own progress."""
    await fill(bus, EPISODES, 5)
    await commit(bus, "run", EPISODES, 3)
    await commit(bus, "eval", EPISODES, 5)

    assert (await lag(bus, "run")).lag == 2


async def test_what_is_done_behind_a_slow_record_is_no_lag(bus):
    """The map beside the offset is read: two in flight and one that was never handed out are left."""
    await fill(bus, EPISODES, 10)
    member = await bus.join([EPISODES.name], "run")
    await member.commit({TopicPartition(EPISODES.name, 0): encode(2, OffsetMap(9, {2: 1, 5: 1}))})
    await member.close()

    assert (await lag(bus, "run")).lag == 3


async def test_records_that_retention_removed_are_nobodys_work(bus):
    """Neither for a new group nor for one that was behind them."""
    await fill(bus, EPISODES, 10)
    await commit(bus, "run", EPISODES, 2)
    bus.log.trim(TopicPartition(EPISODES.name, 0), 6)
    await fill(bus, TASKS, 4)
    bus.log.trim(TopicPartition(TASKS.name, 0), 1)

    assert (4, 3) == ((await lag(bus, "run")).lag, (await lag(bus, "init")).lag)


async def test_a_group_that_passed_the_end_meanwhile_is_not_behind(bus):
    """End and progress are asked for one after the other while work goes on."""
    await fill(bus, EPISODES, 2)
    await fill(bus, EPISODES, 3, partition=1)
    await commit(bus, "run", EPISODES, 2)
    seen = await bus.end_offsets(EPISODES.name)
    await fill(bus, EPISODES, 4)
    await commit(bus, "run", EPISODES, 6)

    async def earlier(topic):
        return seen if topic == EPISODES.name else await MemoryBus.end_offsets(bus, topic)

    bus.end_offsets = earlier

    assert (await lag(bus, "run")).lag == 3
