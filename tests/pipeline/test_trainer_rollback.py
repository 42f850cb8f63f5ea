"""A run goes back to an earlier step: what was undone stays undone, and everything else is as in any run."""

from __future__ import annotations

import asyncio
import random

import pytest
from mortal import Fate, MortalBus, mortal
from synthetic_run import RUN, Killed, decisions, live, memory_bus, record_trajectories, records_of, run_config

from infra.bus import TopicPartition
from infra.clock import SystemClock
from infra.errors import ConfigError
from schemas.arbiter import Arbiter
from schemas.control import Credit, PolicyVersion
from schemas.decisions import Branch, StepDecided, VersionPublished
from schemas.dispositions import Disposition, dispositions
from schemas.partition import partition_for
from schemas.topics import CONTROL, DECISIONS, TRAJECTORIES
from trainer import checkpoint, loop
from trainer.history import History
from trainer.replay import replay

CLOCK = SystemClock()
SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed >= 3 else ()) for seed in range(16)]


async def train(config, bus, fate=None, **options):
    fate = fate or Fate()
    with mortal(fate):
        async with asyncio.timeout(60):
            return await loop.run(config, MortalBus(bus, fate), CLOCK, **options)


def configured(tmp_path, model, steps, name="one", every=1):
    return run_config(tmp_path, model, name, stop={"max_steps": steps}, checkpoints={"every": every, "keep": 9})


async def rolled_back(tmp_path, model, *, back_to=2, every=1):
    """Return the bus of a run of four steps that went back to one and then made five."""
    bus = await memory_bus()
    await record_trajectories(bus, groups=40, seed=3)
    await train(configured(tmp_path, model, 4, every=every), bus)
    await train(configured(tmp_path, model, 5, every=every), bus, rollback=back_to)
    return bus


async def ledger(bus):
    """Return where every sample is."""
    arbiter, accepted, admitted = Arbiter(), {}, {}
    partition = TopicPartition("trajectories", partition_for(RUN, TRAJECTORIES.partitions))
    for offset, message in enumerate(await records_of(bus, TRAJECTORIES, partition)):
        task = message.task
        admitted[task.group, task.sample] = None
        if arbiter.rule(task.group, task.sample, task.payload_digest, offset) == "accepted":
            accepted[task.group, task.sample] = (offset, message.outcome)
    return dispositions(admitted, accepted, await live(bus), has_trainer=True)


@pytest.mark.parametrize(("back_to", "every"), [(2, 1), (3, 2), (0, 1)])
async def test_a_run_goes_on_from_an_earlier_step_without_the_groups_of_later_ones(model, tmp_path, back_to, every):
    """From a checkpoint, between two, and from the start: later steps are new, and no group is trained on twice."""
    bus = await rolled_back(tmp_path, model, back_to=back_to, every=every)

    said = await live(bus)
    at = next(index for index, d in enumerate(said) if isinstance(d, Branch))
    undone = {m.group for d in said[:at] if isinstance(d, StepDecided) and d.step > back_to for m in d.members}
    stays = {m.group for d in said[:at] if isinstance(d, StepDecided) and d.step <= back_to for m in d.members}
    after = [d for d in said[at:] if isinstance(d, StepDecided)]
    anew = [m.group for d in after for m in d.members]
    assert [d.step for d in after] == list(range(back_to + 1, 6))
    assert not set(anew) & (undone | stays)
    assert all(len({m.group for m in d.members}) == 2 for d in after)
    books = await ledger(bus)
    assert books.violations == []
    assert books.counts()[Disposition.ROLLED_BACK] == sum(
        len(d.members) for d in said[:at] if isinstance(d, StepDecided) and d.step > back_to
    )
    report = await replay(bus, CLOCK, RUN)
    assert (report.all_equal, len(report.steps)) == (True, 5), report.summary()


async def test_the_weights_that_stay_are_announced_under_a_number_that_was_never_used(model, tmp_path):
    """The same bytes as before, above every undone version; the credit asks for nothing older."""
    bus = await rolled_back(tmp_path, model)

    versions = [d for d in await live(bus) if isinstance(d, VersionPublished)]
    branch = next(offset for offset, d in await decisions(bus) if isinstance(d, Branch))
    control = await records_of(bus, CONTROL, TopicPartition("control", 0))
    assert [(v.step, v.version) for v in versions] == [
        *((n, n) for n in range(5)),
        *((n + 2, n + 5) for n in range(4)),
    ]
    assert versions[5].digest == versions[2].digest
    epoch = max(d.epoch for d in control if isinstance(d, PolicyVersion))
    assert epoch < branch
    assert min(c.min_version for c in control if isinstance(c, Credit) and c.epoch == epoch) == 5
    assert [c.version for c in control if isinstance(c, PolicyVersion) and c.epoch == epoch] == [5, 6, 7, 8]


async def test_checkpoints_of_undone_steps_go_and_the_older_ones_stay(model, tmp_path):
    """Those of the new branch take their place."""
    await rolled_back(tmp_path, model)

    found = sorted(p.name.partition("-")[2] for p in (tmp_path / "one" / "checkpoints").iterdir())
    assert found == ["1", "2", "3", "4", "5"]
    assert len({p.name for p in (tmp_path / "one" / "checkpoints").iterdir() if p.name.startswith("0-")}) == 2


async def test_a_run_may_go_back_again_and_further(model, tmp_path):
    """Back to 3, on to 5, back to 1, on to 4: books and replay agree, and no group is in two places."""
    bus = await rolled_back(tmp_path, model, back_to=3)
    await train(configured(tmp_path, model, 4), bus, rollback=1)

    history = History.of(await decisions(bus))
    assert (history.last_step, [b.from_step for b in history.branches]) == (4, [3, 1])
    assert (await ledger(bus)).violations == []
    report = await replay(bus, CLOCK, RUN)
    assert (report.all_equal, len(report.steps)) == (True, 4), report.summary()


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_trainer_that_is_killed_while_it_goes_back_or_later_decides_the_same(model, tmp_path, seed):
    """With and without the option given again; weights and decisions are those of the rollback that nobody killed."""
    draw = random.Random(seed)
    settings = {"back_to": draw.choice([0, 1, 2, 3]), "every": draw.choice([1, 2])}
    calm = await rolled_back(tmp_path / "calm", model, **settings)
    bus = await memory_bus()
    bus.log.copy(calm.log, TRAJECTORIES.name)
    every = settings["every"]
    await train(configured(tmp_path, model, 4, every=every), bus)
    config, back_to = configured(tmp_path, model, 5, every=every), settings["back_to"]

    rollback = {"rollback": back_to}
    for fate in (Fate(draw.randint(1, 60)), Fate(draw.randint(1, 30)), Fate()):
        try:
            await train(config, bus, fate, **rollback)
            break
        except Killed:
            branched = History.of(await decisions(bus)).branches
            rollback = {"resume": True} if branched else {"rollback": back_to}

    def told(log):
        steps = [(d.step, d.position, d.digest) for d in log if isinstance(d, StepDecided)]
        versions = [(d.step, d.version, d.digest) for d in log if isinstance(d, VersionPublished)]
        return steps, versions, [d.from_step for d in log if isinstance(d, Branch)]

    def learned(directory):
        last = checkpoint.latest(directory / "one" / "checkpoints")
        return last.state.step, last.weights.read_bytes(), last.optimizer()

    assert told(await live(bus)) == told(await live(calm))
    assert learned(tmp_path) == learned(tmp_path / "calm")
    assert (await replay(bus, CLOCK, RUN)).all_equal


async def test_there_must_be_something_to_go_back_to(model, tmp_path):
    """A step that was never made is refused before anything is written; the last one undoes nothing."""
    bus = await memory_bus()
    await record_trajectories(bus, groups=20, seed=3)
    config = configured(tmp_path, model, 2)
    await train(config, bus)
    before = await decisions(bus)

    with pytest.raises(ConfigError, match=r"--rollback 3: run 'r' has made 2 steps"):
        await train(config, bus, rollback=3)
    assert await decisions(bus) == before

    await train(configured(tmp_path, model, 3), bus, rollback=2)
    said = await live(bus)
    assert not [d for d in said if isinstance(d, Branch)]
    assert [d.step for d in said if isinstance(d, StepDecided)] == [1, 2, 3]


async def test_a_wire_reader_of_decisions_knows_a_branch(model, tmp_path):
    """The topic carries it."""
    bus = await rolled_back(tmp_path, model)

    partition = TopicPartition("decisions", partition_for(RUN, DECISIONS.partitions))
    assert [d.from_step for d in await records_of(bus, DECISIONS, partition) if isinstance(d, Branch)] == [2]
