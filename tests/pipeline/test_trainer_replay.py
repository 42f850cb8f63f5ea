import asyncio

import msgspec
import pytest
from synthetic_run import (
    RUN,
    Killed,
    MortalBus,
    decisions,
    memory_bus,
    record_trajectories,
    run_config,
)

from infra.bus import TopicPartition
from infra.clock import SystemClock
from infra.errors import ConfigError
from schemas.codec import encode
from schemas.decisions import StepDecided
from schemas.partition import partition_for
from schemas.topics import DECISIONS, TRAJECTORIES
from trainer import loop
from trainer.replay import replay

CLOCK = SystemClock()
LOG = TopicPartition(TRAJECTORIES.name, partition_for(RUN, TRAJECTORIES.partitions))


async def trained(model, tmp_path, *, process=False, **changes):
    """Return a bus with a finished run on it."""
    bus = await memory_bus()
    await record_trajectories(bus, process=process)
    async with asyncio.timeout(60):
        await loop.run(run_config(tmp_path, model, **changes), bus, CLOCK)
    return bus


async def test_a_run_replays_to_the_same_digests_twice(model, tmp_path):
    """Nothing but the log is read, and reading it changes nothing."""
    bus = await trained(model, tmp_path)

    first, second = await replay(bus, CLOCK, RUN), await replay(bus, CLOCK, RUN)

    assert first == second
    assert (first.equal, len(first.steps), first.all_equal) == (4, 4, True)
    assert first.drops > 0
    assert first.summary() == "4/4 digests equal"


async def test_advantages_of_single_turns_replay_too(model, tmp_path):
    """Process rewards are in the record, so no token is needed to make them again."""
    bus = await trained(model, tmp_path, process=True)
    changed = [d.advantage_digest for _, d in await decisions(bus) if isinstance(d, StepDecided)]

    report = await replay(bus, CLOCK, RUN)

    assert report.all_equal, report.summary()
    plain = await trained(model, tmp_path / "plain")
    assert all(d.advantage_digest not in changed for _, d in await decisions(plain) if isinstance(d, StepDecided))


async def test_advantages_that_need_the_model_are_said_not_to_be_compared(model, tmp_path):
    """A PPO step has no advantage digest; its batch is compared as ever."""
    bus = await trained(model, tmp_path, process=True, algorithm={"estimator": "gae", "credit": "token"})

    report = await replay(bus, CLOCK, RUN)

    assert {d.advantage_digest for _, d in await decisions(bus) if isinstance(d, StepDecided)} == {""}
    assert report.all_equal
    assert report.summary() == "4/4 digests equal (4 with advantages made by a model, which are not compared)"
    assert report.as_dict()["advantages_not_compared"] == 4


async def test_a_control_replays_too_and_is_another_run(model, tmp_path):
    """Who got whose reward follows from the recorded seed and the names, and the batch digest holds it."""
    bus, plain = await trained(model, tmp_path, algorithm={"shuffle_seed": 7}), await trained(model, tmp_path / "plain")

    report = await replay(bus, CLOCK, RUN)

    assert (report.all_equal, len(report.steps)) == (True, 4), report.summary()
    ours, theirs = [[d for _, d in await decisions(b) if isinstance(d, StepDecided)] for b in (bus, plain)]
    assert [d.digest for d in ours] != [d.digest for d in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert [(m.group, m.sample) for m in one.members] == [(m.group, m.sample) for m in other.members]


async def test_the_last_steps_can_be_asked_for(model, tmp_path):
    """All are made again, the last ones are reported."""
    report = await replay(await trained(model, tmp_path), CLOCK, RUN, last=2)

    assert [step.step for step in report.steps] == [3, 4]


async def test_a_changed_reward_is_named_and_later_steps_are_judged_for_themselves(model, tmp_path):
    """Step 2 differs, the others do not."""
    bus = await trained(model, tmp_path)
    step = next(d for _, d in await decisions(bus) if isinstance(d, StepDecided) and d.step == 2)
    member = step.members[0]
    # One bit: the first letter of the family's name turns into a capital.
    bus.log.rewrite(LOG, member.offset, lambda value: value.replace(b"made-up", b"Made-up", 1))

    report = await replay(bus, CLOCK, RUN)

    assert [s.equal for s in report.steps] == [True, False, True, True]
    cause = report.first_difference.cause
    assert cause.startswith(f"{member.group}/{member.sample}: its record at offset {member.offset} had content")
    assert report.as_dict()["first_difference"]["step"] == 2


async def test_an_unreadable_record_is_named_by_what_is_missing(model, tmp_path):
    """The group it belonged to is no longer complete."""
    bus = await trained(model, tmp_path)
    step = next(d for _, d in await decisions(bus) if isinstance(d, StepDecided))
    member = step.members[-1]
    bus.log.rewrite(LOG, member.offset, lambda _: b"rubbish")

    report = await replay(bus, CLOCK, RUN)

    assert not report.steps[0].equal
    name = f"{member.group}/{member.sample}: its record at offset {member.offset}"
    assert report.steps[0].cause == f"{name} cannot be read any more, or is another run's"


async def test_a_forged_decision_is_named(model, tmp_path):
    """Its members no longer have its digest."""
    bus = await trained(model, tmp_path)
    partition = TopicPartition(DECISIONS.name, partition_for(RUN, DECISIONS.partitions))
    offset, step = next((o, d) for o, d in await decisions(bus) if isinstance(d, StepDecided))
    forged = msgspec.structs.replace(step, members=step.members[1:])
    bus.log.rewrite(partition, offset, lambda _: encode(forged))

    report = await replay(bus, CLOCK, RUN)

    assert "decision itself was changed" in report.first_difference.cause


async def test_a_run_that_was_killed_and_resumed_with_other_rules_replays(model, tmp_path):
    """Each step by the rules of the trainer that decided it, drops of the trainer before obeyed."""
    bus = await memory_bus()
    await record_trajectories(bus)
    with pytest.raises(Killed):
        await loop.run(run_config(tmp_path, model), MortalBus(bus, 14, after=True), CLOCK)
    other = run_config(tmp_path, model, algorithm={"groups": 3, "filter": "off"}, stop={"max_steps": 5})
    async with asyncio.timeout(60):
        await loop.run(other, bus, CLOCK, resume=True)

    report = await replay(bus, CLOCK, RUN)

    assert report.all_equal, report.summary()
    assert len(report.steps) == 5


async def test_a_run_without_a_trainer_cannot_be_replayed():
    """The error says where it looked."""
    with pytest.raises(ConfigError, match="no trainer in `decisions`"):
        await replay(await memory_bus(), CLOCK, "nobody")
