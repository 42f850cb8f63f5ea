import asyncio
import random
from pathlib import Path

import msgspec
import pytest
from synthetic_run import (
    RUN,
    SAMPLES,
    Killed,
    MortalBus,
    Sampler,
    cancelled,
    decisions,
    failure,
    live,
    memory_bus,
    points,
    record_trajectories,
    records_of,
    run_config,
    task,
    trajectory,
)

from infra.blobs import BlobsAway
from infra.blobs.memory import MemoryBlobs
from infra.bus import TopicPartition
from infra.clock import SystemClock
from infra.errors import ConfigError
from infra.memory import MemoryBus
from infra.wire import Publisher
from schemas.control import Credit, PolicyVersion
from schemas.decisions import (
    DropReason,
    GroupDropped,
    RunEnded,
    StepDecided,
    TrainerStarted,
    VersionPublished,
    live_decisions,
)
from schemas.dispositions import Disposition, dispositions
from schemas.partition import partition_for
from schemas.topics import CONTROL, DECISIONS, TABLE, TRAJECTORIES
from tests.logs import wait_until
from trainer import loop
from trainer.decision_log import Fenced
from trainer.ending import NothingToLearn
from trainer.replay import replay
from trainer.run_lock import RunLock
from trainer.weights import load_model, weight_bytes, weights_digest

CLOCK = SystemClock()


async def train(config, bus, **options):
    async with asyncio.timeout(60):
        return await loop.run(config, bus, CLOCK, **options)


def told(log):
    """Return what the live decisions say, without who wrote them and when a trainer started."""
    said = []
    for _, decision in live_decisions(log):
        match decision:
            case StepDecided():
                said.append((decision.step, decision.position, decision.digest, decision.advantage_digest))
            case GroupDropped():
                said.append((decision.group, decision.reason, decision.position))
            case VersionPublished():
                said.append((decision.step, decision.version, decision.digest))
            case RunEnded():
                said.append((decision.position, decision.step, decision.reason, decision.unused))
            case _:
                pass
    # A trainer that died right after it had said that the run is over is followed by one that says so again.
    return said[:-1] if said[-2:-1] == said[-1:] else said


async def accepted(bus):
    """Return (group, sample) -> (offset, outcome) of the first record of each sample."""
    partition = partition_for(RUN, TRAJECTORIES.partitions)
    first = {}
    for offset, message in enumerate(await records_of(bus, TRAJECTORIES, TopicPartition("trajectories", partition))):
        first.setdefault((message.task.group, message.task.sample), (offset, message.outcome))
    return first


# ---- one run


async def test_a_run_decides_trains_announces_and_ends(model, tmp_path):
    """Each step is one decision and one version; the end is written down; the credit is closed."""
    bus = await memory_bus()
    await record_trajectories(bus)

    result = await train(run_config(tmp_path, model), bus)

    log = [decision for _, decision in await decisions(bus)]
    assert isinstance(log[0], TrainerStarted)
    assert [d.step for d in log if isinstance(d, StepDecided)] == [1, 2, 3, 4]
    assert [(d.step, d.version) for d in log if isinstance(d, VersionPublished)] == [(n, n) for n in range(5)]
    assert isinstance(log[-1], RunEnded)
    assert (result.steps, result.version, result.reason) == (4, 4, "4 steps made")
    control = await records_of(bus, CONTROL, TopicPartition("control", 0))
    granted = [c for c in control if isinstance(c, Credit)]
    assert granted[-1].closed
    assert [c.admit_up_to for c in granted] == sorted(c.admit_up_to for c in granted)
    assert [c.version for c in control if isinstance(c, PolicyVersion)] == [0, 1, 2, 3, 4]


async def test_the_credit_of_each_step_has_the_horizon_of_its_stage(model, tmp_path):
    """Two steps of 6 turns, then 13 to the end; the curriculum is in the log with the rest of the configuration."""
    bus = await memory_bus()
    await record_trajectories(bus)

    await train(run_config(tmp_path, model, curriculum={"horizons": [6, 13], "every": 2}), bus)

    control = await records_of(bus, CONTROL, TopicPartition("control", 0))
    horizons = [c.horizon for c in control if isinstance(c, Credit)]
    assert sorted(horizons) == horizons
    assert set(horizons) == {6, 13}
    started = next(d for _, d in await decisions(bus) if isinstance(d, TrainerStarted))
    assert started.config["curriculum"]["horizons"] == [6, 13]


async def test_a_version_is_a_model_directory_that_loads(model, tmp_path):
    """Weights, config and tokenizer, named in the control record with the digest of the weights."""
    bus = await memory_bus()
    await record_trajectories(bus)

    result = await train(run_config(tmp_path, model, stop={"max_steps": 1}), bus)

    control = await records_of(bus, CONTROL, TopicPartition("control", 0))
    last = [c for c in control if isinstance(c, PolicyVersion)][-1]
    assert last.directory == result.directory
    assert weights_digest(weight_bytes(load_model(Path(last.directory)))) == last.digest
    assert (Path(last.directory) / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


async def test_every_sample_is_in_one_place_and_none_is_a_remainder(model, tmp_path):
    """The dispositions of the log's decisions have no violation."""
    bus = await memory_bus()
    await record_trajectories(bus)
    await train(run_config(tmp_path, model), bus)

    first = await accepted(bus)
    said = await live(bus)
    ledger = dispositions(first, first, said, has_trainer=True)

    assert ledger.violations == []
    assert ledger.places.keys() == first.keys()
    assert ledger.counts()[Disposition.TRAINED] > 0


async def test_metrics_say_what_each_step_was_like(model, tmp_path):
    """Reward, success, kept and dropped groups, entropy, lag and rates go to `metrics`."""
    bus = await memory_bus()
    await record_trajectories(bus)
    await train(run_config(tmp_path, model), bus)

    found = await points(bus)

    names = {point.name for point in found}
    assert {"trainer.reward_mean", "trainer.groups_dropped", "trainer.entropy_nats", "trainer.idle_share"} <= names
    assert {"trainer.reward_component_mean", "trainer.mixed_share", "trainer.left_s"} <= names
    causes = {point.labels["cause"] for point in found if point.name == "trainer.idle_cause_share"}
    assert "publication" in causes
    assert {point.step for point in found} == {1, 2, 3, 4}


async def test_records_of_other_runs_are_ignored(model, tmp_path):
    """A partition is shared by several runs."""
    plain, mixed = await memory_bus(), await memory_bus()
    publisher = Publisher(mixed, CLOCK, "test")
    shared = partition_for(RUN, TRAJECTORIES.partitions)
    for sample in range(3):
        await publisher.publish(TRAJECTORIES, trajectory(task(0, sample, run="other"), float(sample)), partition=shared)
    await record_trajectories(plain)
    await record_trajectories(mixed)

    await train(run_config(tmp_path, model, "a"), plain)
    await train(run_config(tmp_path, model, "b"), mixed)

    batches = [
        [[(m.group, m.sample) for m in d.members] for _, d in await decisions(bus) if isinstance(d, StepDecided)]
        for bus in (plain, mixed)
    ]
    assert batches[0] == batches[1]


async def test_a_cancelled_run_drops_its_groups_and_the_trainer_says_what_it_waits_for(
    model, tmp_path, monkeypatch, caplog
):
    """One sibling too few is incomplete, one to spare is trained on; the trainer waits, and is not silent about it."""
    monkeypatch.setattr(loop, "SAY_EVERY_S", 0.5)
    caplog.set_level("INFO")
    bus, stop = await memory_bus(), asyncio.Event()
    publisher = Publisher(bus, CLOCK, "test")
    ends = {0: "cc", 1: "fcc", 2: "t1c", 3: "ccc", 4: "t1f"}  # group -> cancelled, failed, or graded 1 and 0
    for number, how in ends.items():
        for sample, letter in enumerate(how):
            what = task(number, sample)
            graded = {"t": trajectory(what, 1.0), "1": trajectory(what, 0.0), "f": failure(what)}
            await publisher.publish(TRAJECTORIES, graded.get(letter) or cancelled(what))
    running = asyncio.create_task(train(run_config(tmp_path, model), bus, stop=stop))
    await wait_until(lambda: "waits for records" in caplog.text, True, limit_s=50)
    stop.set()
    await running

    log = [decision for _, decision in await decisions(bus)]
    dropped = {d.group: d.reason for d in log if isinstance(d, GroupDropped)}
    steps = [sorted({m.group for m in d.members}) for d in log if isinstance(d, StepDecided)]
    assert {"g0001": DropReason.INCOMPLETE, "g0003": DropReason.INCOMPLETE} == dropped
    assert [["g0002", "g0004"]] == steps
    assert "run r: step 2 waits for records, none came for" in caplog.text
    assert "0 of 2 groups are complete, 1 are begun, dropped since the last step: none" in caplog.text
    assert "`rollmill runs` tells whether the run is cancelled" in caplog.text


# ---- going on


async def test_a_killed_run_with_a_value_head_goes_on_to_the_same_weights(model, tmp_path):
    """Advantages are made again from the restored head: nothing of them is in the log, and nothing else is lost."""
    calm, bus = await memory_bus(), await memory_bus()
    ppo = {"algorithm": {"estimator": "gae", "gamma": 0.9, "value_lr": 0.01, "epochs": 2}}
    for each in (calm, bus):
        await record_trajectories(each, process=True)
    await train(run_config(tmp_path, model, "calm", **ppo), calm)
    config = run_config(tmp_path, model, "killed", checkpoints={"every": 3}, **ppo)

    for death in (9, 6):
        with pytest.raises(Killed):
            await train(config, MortalBus(bus, death, after=True), resume=death != 9)
    await train(config, bus, resume=True)

    assert told(await decisions(bus)) == told(await decisions(calm))


async def test_a_cancelled_trainer_leaves_a_run_that_can_be_resumed(model, tmp_path):
    """Cancelled while it waits for records; more records and a successor finish the run."""
    bus = await memory_bus()
    await record_trajectories(bus, groups=8)
    config = run_config(tmp_path, model)
    waiting = asyncio.Event()

    def watch(now):
        if now.phase == "waiting" and now.step >= 1:
            waiting.set()

    running = asyncio.create_task(train(config, bus, on_progress=watch))
    await asyncio.wait_for(waiting.wait(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await record_trajectories(bus, groups=30)

    result = await train(config, bus, resume=True)

    assert result.steps == 4


async def test_a_trainer_cancelled_in_the_middle_of_a_step_makes_it_again(model, tmp_path):
    """The step is decided; its optimizer work is given up, and repeated to the same weights by the successor."""
    calm, bus = await memory_bus(), await memory_bus()
    for each in (calm, bus):
        await record_trajectories(each)
    await train(run_config(tmp_path, model, "calm"), calm)
    config = run_config(tmp_path, model, "cancelled")
    training = asyncio.Event()
    running = asyncio.create_task(
        train(config, bus, on_progress=lambda now: training.set() if now.phase == "training" else None)
    )
    await asyncio.wait_for(training.wait(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    await train(config, bus, resume=True)

    assert told(await decisions(bus)) == told(await decisions(calm))


async def test_a_run_is_stopped_in_good_order_on_request(model, tmp_path):
    """The end is a record, and what was read and not used is named in it."""
    bus = await memory_bus()
    await record_trajectories(bus, groups=1)
    stop = asyncio.Event()
    config = run_config(tmp_path, model, algorithm={"filter": "off"})

    def watch(now):
        if now.buffered or now.partial:
            stop.set()

    result = await train(config, bus, stop=stop, on_progress=watch)

    (ended,) = [d for _, d in await decisions(bus) if isinstance(d, RunEnded)]
    assert result.reason == ended.reason == "stopped"
    assert ended.unused


async def test_a_started_run_is_not_started_again_by_accident(model, tmp_path):
    """Without --resume the error names both ways on."""
    bus = await memory_bus()
    await record_trajectories(bus)
    await train(run_config(tmp_path, model), bus)

    with pytest.raises(ConfigError, match=r"--resume .* another name"):
        await train(run_config(tmp_path, model), bus)


async def test_checkpoints_of_another_log_are_refused(model, tmp_path):
    """A new log under an old directory would train on the wrong weights."""
    bus = await memory_bus()
    await record_trajectories(bus)
    await train(run_config(tmp_path, model), bus)

    with pytest.raises(ConfigError, match="not in the log"):
        await train(run_config(tmp_path, model), await memory_bus(), resume=True)


async def test_a_resumed_run_keeps_its_seed(model, tmp_path):
    """What decides everything else cannot change half-way."""
    bus = await memory_bus()
    await record_trajectories(bus)
    await train(run_config(tmp_path, model), bus)

    with pytest.raises(ConfigError, match="seed"):
        await train(run_config(tmp_path, model, seed=3), bus, resume=True)


async def test_a_finished_run_can_be_prolonged(model, tmp_path):
    """More steps, a smaller batch and another learning rate are allowed on resume."""
    bus = await memory_bus()
    await record_trajectories(bus)
    await train(run_config(tmp_path, model, stop={"max_steps": 2}), bus)

    longer = run_config(tmp_path, model, stop={"max_steps": 5}, algorithm={"groups": 1, "lr": 1e-5})
    result = await train(longer, bus, resume=True)

    steps = [d for d in await live(bus) if isinstance(d, StepDecided)]
    assert result.steps == 5
    assert [len({m.group for m in d.members}) for d in steps] == [2, 2, 1, 1, 1]


async def test_a_run_in_four_parts_trains_on_the_same_samples_as_in_one(model, tmp_path):
    """Stopped in good order and resumed three times: the decisions, read as a ledger, differ in nothing."""
    whole, parts = await memory_bus(), await memory_bus()
    await record_trajectories(whole)
    await record_trajectories(parts)
    await train(run_config(tmp_path, model, "whole", stop={"max_steps": 8}), whole)
    for part in range(1, 5):
        stop = {"max_steps": 2 * part}
        await train(run_config(tmp_path, model, "parts", stop=stop), parts, resume=part > 1)

    def ledger(log):
        return [
            (d.step, d.position, d.members, d.digest, d.advantage_digest)
            for _, d in live_decisions(log)
            if isinstance(d, StepDecided)
        ]

    in_one, in_four = ledger(await decisions(whole)), ledger(await decisions(parts))
    assert in_one == in_four
    assert [step for step, *_ in in_one] == list(range(1, 9))


# ---- two trainers


async def test_an_older_trainer_gives_up_when_another_takes_over(model, tmp_path):
    """It writes nothing that counts, and says why it ends."""
    bus = await memory_bus()
    config = run_config(tmp_path, model)
    waiting = asyncio.Event()
    old = asyncio.create_task(
        train(config, bus, on_progress=lambda now: waiting.set() if now.phase == "waiting" else None)
    )
    await asyncio.wait_for(waiting.wait(), 30)

    publisher = Publisher(bus, CLOCK, "test")
    await publisher.publish(DECISIONS, TrainerStarted(run=RUN, config={}, start=0, step=0))
    await record_trajectories(bus)

    with pytest.raises(Fenced, match="took run 'r' over"):
        await old
    said = await live(bus)
    assert not [d for d in said if isinstance(d, StepDecided)]


async def test_two_trainers_in_one_directory_are_refused(model, tmp_path):
    """The second one names the first."""
    config = run_config(tmp_path, model)

    with RunLock(config.directory), pytest.raises(ConfigError, match=r"another trainer \(pid \d+\)"):
        await train(config, await memory_bus())


# ---- pacing


@pytest.mark.parametrize("max_lag", [0, 1, 2])
async def test_credit_keeps_every_token_within_the_lag(model, tmp_path, max_lag):
    """A sampler that obeys the credit never makes a token that is too old, and the run never waits for ever."""
    bus = await memory_bus()
    sampler = Sampler(bus, seed=max_lag)
    lags = []
    config = run_config(tmp_path, model, algorithm={"max_lag": max_lag})

    def watch(now):
        if now.last.tokens:
            lags.append((now.last.lag_max, now.last.masked_share))

    async with asyncio.TaskGroup() as group:
        sampling = group.create_task(sampler.run())
        result = await train(config, bus, on_progress=watch)
        await asyncio.wait_for(sampling, 30)

    assert result.steps == 4
    assert max(lag for lag, _ in lags) <= max_lag
    assert {share for _, share in lags} == {0.0}


async def test_the_run_ends_when_the_policy_succeeds(model, tmp_path):
    """Also when all groups are dropped because they always succeed: no step would ever come."""
    bus = await memory_bus()
    sampler = Sampler(bus, success=lambda _: 1.0)
    config = run_config(tmp_path, model, stop={"success": 0.9, "success_groups": 8})

    async with asyncio.TaskGroup() as group:
        group.create_task(sampler.run())
        result = await train(config, bus)

    assert result.reason == "success 1.000 over 8 groups"
    assert result.steps == 0


async def test_a_task_that_teaches_nothing_ends_the_run_with_a_reason(model, tmp_path):
    """All groups fail alike: after the limit the run says so."""
    bus = await memory_bus()
    sampler = Sampler(bus, success=lambda _: 0.0)

    async with asyncio.TaskGroup() as group:
        group.create_task(sampler.run())
        result = await train(run_config(tmp_path, model, stop={"max_dropped": 5}), bus)

    assert "too easy or too hard" in result.reason


async def dull_log(bus, *, good=5, dull=9):
    """Publish groups of which the first few differ in success, and then only such that do not."""
    publisher = Publisher(bus, CLOCK, "test")
    for number in range(good + dull):
        for sample in range(3):
            success = float(number < good and sample == 0)
            await publisher.publish(TRAJECTORIES, trajectory(task(number, sample), success))


async def test_a_run_may_go_on_with_fewer_groups_when_too_many_are_dropped(model, tmp_path, caplog):
    """The short step says so, in the log and to a person; replay makes it again; without any group the run ends."""
    bus = await memory_bus()
    await dull_log(bus)
    stop = {"max_steps": 9, "max_dropped": 4, "on_no_variance": "fewer"}

    result = await train(run_config(tmp_path, model, stop=stop), bus)

    steps = [d for _, d in await decisions(bus) if isinstance(d, StepDecided)]
    assert [(len({m.group for m in d.members}), d.missing) for d in steps] == [(2, 0), (2, 0), (1, 1)]
    assert result.reason == "4 groups dropped without a step (4 filtered): the task is too easy or too hard"
    assert "step 3 lacks 1 groups: 4 groups dropped without a step (4 filtered)" in caplog.text
    report = await replay(bus, CLOCK, RUN)
    assert (report.all_equal, len(report.steps)) == (True, 3), report.summary()


async def test_a_run_may_raise_when_too_many_groups_are_dropped_and_go_on_later(model, tmp_path):
    """The end is written down, the feeder keeps its credit, and a resumed run with a larger bound goes on."""
    bus = await memory_bus()
    await dull_log(bus)
    stop = {"max_steps": 9, "max_dropped": 4, "on_no_variance": "raise"}

    with pytest.raises(NothingToLearn, match=r"4 groups dropped .*--resume goes on with a larger `stop.max_dropped`"):
        await train(run_config(tmp_path, model, stop=stop), bus)

    (ended,) = [d for _, d in await decisions(bus) if isinstance(d, RunEnded)]
    control = await records_of(bus, CONTROL, TopicPartition("control", 0))
    assert ended.reason.startswith("4 groups dropped without a step")
    assert not [c for c in control if isinstance(c, Credit) and c.closed]
    result = await train(run_config(tmp_path, model, stop={**stop, "max_dropped": 8, "max_steps": 2}), bus, resume=True)
    assert result.reason == "2 steps made"


@pytest.mark.parametrize("buffer_bytes", [0, 4_000])
async def test_a_run_trains_the_same_however_little_it_holds_in_memory(model, tmp_path, buffer_bytes):
    """Token records that do not fit are read from the log when their step is decided."""
    whole, lean = await memory_bus(), await memory_bus()
    for bus in (whole, lean):
        await record_trajectories(bus)
    await train(run_config(tmp_path, model, "whole"), whole)
    await train(run_config(tmp_path, model, "lean", buffer_bytes=buffer_bytes), lean)

    assert told(await decisions(lean)) == told(await decisions(whole))


class FlakyBlobs(MemoryBlobs):
    """A store that does not answer every other time."""

    asked = 0

    async def get(self, digest):
        self.asked += 1
        if self.asked % 2:
            raise BlobsAway("the disk is away")
        return await super().get(digest)


async def test_a_store_of_large_values_that_is_away_for_a_moment_ends_no_trainer(model, tmp_path):
    """It is an outage like the log's own."""
    bus = MemoryBus(CLOCK, blobs=FlakyBlobs(CLOCK))
    await bus.create_topics(TABLE)
    noise = random.Random(0).randbytes(1_200_000)
    for number in range(2):
        for sample in range(SAMPLES):
            made = trajectory(task(number, sample), float(sample % 2))
            large = msgspec.structs.replace(made, verdict={"screen": noise}) if sample == 0 else made
            await Publisher(bus, CLOCK, "test").publish(TRAJECTORIES, large)
    result = await train(run_config(tmp_path, model, stop={"max_steps": 1}), bus)

    assert (result.steps, bus.blobs.asked >= 2) == (1, True)
