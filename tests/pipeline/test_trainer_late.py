"""A sample that is very late: the run waits for it, masks it or drops its group, and never stands still for ever."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from synthetic_run import RUN, Sampler, SlowSampler, decisions, live, memory_bus, records_of, run_config

from infra.bus import TopicPartition
from infra.clock import SystemClock
from producers.reaper import Reaper
from schemas.arbiter import Arbiter, Ruling
from schemas.decisions import DropReason, GroupDropped, StepDecided
from schemas.dispositions import Disposition, dispositions
from schemas.partition import partition_for
from schemas.topics import TRAJECTORIES
from tests.logs import wait_until
from trainer import loop
from trainer.algorithm_config import Late
from trainer.replay import replay

CLOCK = SystemClock()
GROUPS = 2
LAGS = pytest.mark.parametrize("max_lag", [0, 1, 8])


def mixed(draw):
    """Succeed or not, so that hardly any group is dropped: three siblings."""
    return draw.random()


class Running:
    """A trainer and whoever samples for it."""

    def __init__(self, bus, config, sampler):
        self.bus, self.config, self.sampler = bus, config, sampler
        self.now, self.lags, self.masked = None, [], []
        self.stop = asyncio.Event()

    def watch(self, now):
        """Take the figures of each step; a dropped group ends the run."""
        self.now = now
        if now.dropped:
            self.stop.set()
        if now.last.tokens:
            self.lags.append(now.last.lag_max)
            self.masked.append(now.last.masked_share)

    async def __aenter__(self):
        self._sampling = asyncio.create_task(self.sampler.run())
        self.training = asyncio.create_task(
            loop.run(self.config, self.bus, CLOCK, on_progress=self.watch, stop=self.stop)
        )
        return self

    async def __aexit__(self, *_):
        for task in (self.training, self._sampling):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    @property
    def stands_still(self):
        """Tell whether everything that is on its way has ended, but for the late one, and no step is made of it."""
        algorithm = self.config.algorithm
        on_its_way = self.now.buffered + self.now.partial if self.now else 0
        return self.now.phase == "waiting" and on_its_way == (algorithm.max_lag + 1) * algorithm.groups

    async def result(self):
        """Return how the run ended."""
        return await asyncio.wait_for(self.training, 60)


def configured(tmp_path, model, max_lag, late, steps, **changes):
    algorithm = {"max_lag": max_lag, "late": late, "filter": "off", "min_siblings": 2}
    return run_config(tmp_path, model, algorithm=algorithm, stop={"max_steps": steps}, **changes)


async def ledger(bus):
    """Return where every sample is that has ended."""
    arbiter, accepted = Arbiter(), {}
    partition = TopicPartition("trajectories", partition_for(RUN, TRAJECTORIES.partitions))
    for offset, message in enumerate(await records_of(bus, TRAJECTORIES, partition)):
        task = message.task
        if arbiter.rule(task.group, task.sample, task.payload_digest, offset) is Ruling.ACCEPTED:
            accepted[task.group, task.sample] = (offset, message.outcome)
    return dispositions(accepted, accepted, await live(bus), has_trainer=True)


@LAGS
async def test_a_step_waits_for_a_late_sample_until_the_reaper_ends_it(model, tmp_path, max_lag):
    """As many steps as it may lag are made; then the run stands still, and goes on with what is left of the group."""
    bus = await memory_bus()
    config = configured(tmp_path, model, max_lag, "wait", max_lag + 3)
    async with Running(bus, config, SlowSampler(bus, success=mixed)) as running:
        await wait_until(lambda: running.now is not None and running.stands_still, True, limit_s=60)
        assert running.now.step == max_lag
        reaping = asyncio.create_task(Reaper(bus, CLOCK).run())
        result = await running.result()
        reaping.cancel()
        with suppress(asyncio.CancelledError):
            await reaping

    assert result.steps == max_lag + 3
    assert max(running.lags) <= max_lag
    assert set(running.masked) == {0.0}
    first = next(d for _, d in await decisions(bus) if isinstance(d, StepDecided) and d.members[0].group == "g0000")
    assert (first.step, [m.sample for m in first.members[:2]]) == (max_lag + 1, [1, 2])
    books = await ledger(bus)
    assert (books.violations, books.counts()[Disposition.EXPIRED]) == ([], 1)
    report = await replay(bus, CLOCK, RUN)
    assert report.all_equal, report.summary()


@LAGS
async def test_nothing_is_held_where_no_sample_is_late(model, tmp_path, max_lag):
    """The run trains on exactly the asked groups, none too old, and has no token to mask."""
    bus = await memory_bus()
    async with Running(bus, configured(tmp_path, model, max_lag, "wait", 4), Sampler(bus, seed=max_lag)) as running:
        result = await running.result()

    steps = [d for _, d in await decisions(bus) if isinstance(d, StepDecided)]
    assert result.steps == 4
    assert max(running.lags) <= max_lag
    assert {len({m.group for m in step.members}) for step in steps} == {GROUPS}


async def test_a_synchronous_run_waits_whatever_it_says(model, tmp_path):
    """And that is what is written down."""
    assert configured(tmp_path, model, 0, "mask", 1).algorithm.late is Late.WAIT
    assert configured(tmp_path, model, 0, "drop", 1).algorithm.late is Late.WAIT
    assert configured(tmp_path, model, 1, "mask", 1).algorithm.late is Late.MASK


@pytest.mark.parametrize("max_lag", [1, 8])
@pytest.mark.parametrize("late", ["mask", "drop"])
async def test_a_late_group_is_dropped_with_a_reason_or_masked(model, tmp_path, max_lag, late):
    """Nobody waits: the run goes on, and when the sample comes all of its group is too old."""
    bus = await memory_bus()
    config = configured(tmp_path, model, max_lag, late, 1000)
    async with Running(bus, config, SlowSampler(bus, ends_at=max_lag + 2, success=mixed)) as running:
        result = await running.result()

    dropped = {d.group: d.reason for _, d in await decisions(bus) if isinstance(d, GroupDropped)}
    assert result.steps > max_lag
    assert dropped == {"g0000": DropReason.LATE if late == "drop" else DropReason.STALE}
    assert max(running.lags) <= max_lag
    books = await ledger(bus)
    assert (books.violations, books.places["g0000", 0]) == ([], Disposition.STALE)
    assert (await replay(bus, CLOCK, RUN)).all_equal


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_a_trainer_that_dies_while_it_waits_is_followed_by_one_that_waits(model, tmp_path, max_lag):
    """What is on its way is in the checkpoint; nothing is decided that the dead one would not have decided."""
    bus = await memory_bus()
    config = configured(tmp_path, model, max_lag, "wait", max_lag + 2, checkpoints={"every": 2})
    sampler = SlowSampler(bus, success=mixed)
    sampling = asyncio.create_task(sampler.run())
    first = Running(bus, config, sampler)
    dying = asyncio.create_task(loop.run(config, bus, CLOCK, on_progress=first.watch))
    await wait_until(lambda: first.now is not None and first.stands_still, True, limit_s=60)
    dying.cancel()
    with suppress(asyncio.CancelledError):
        await dying
    second = Running(bus, config, sampler)
    living = asyncio.create_task(loop.run(config, bus, CLOCK, on_progress=second.watch, resume=True))
    await wait_until(lambda: second.now is not None and second.stands_still, True, limit_s=60)
    assert second.now.step == max_lag
    reaping = asyncio.create_task(Reaper(bus, CLOCK).run())
    result = await asyncio.wait_for(living, 60)
    for task in (reaping, sampling):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    assert result.steps == max_lag + 2
    assert (await replay(bus, CLOCK, RUN)).all_equal
