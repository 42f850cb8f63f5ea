"""Evaluation beside training: each due version once, before the next one is announced, whatever dies meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from click.testing import CliRunner
from suites import SUITE, MadeUpSuite
from synthetic_run import (
    RUN,
    Killed,
    Sampler,
    decisions,
    live,
    memory_bus,
    points,
    record_trajectories,
    records_of,
    run_config,
)

from infra.bus import TopicPartition
from infra.clock import SystemClock
from infra.errors import ConfigError
from schemas.control import PolicyVersion
from schemas.decisions import Evaluated, RunEnded, StepDecided, VersionPublished
from schemas.dispositions import dispositions
from schemas.scores import Purpose
from schemas.topics import CONTROL
from tests.logs import wait_until
from trainer import checkpoint, loop
from trainer.__main__ import command as trainer_command
from trainer.decision_log import Fenced
from trainer.replay import replay

CLOCK = SystemClock()
EVALUATION = Purpose.EVALUATION


def config_of(tmp_path, model, name="one", **changes):
    return run_config(tmp_path, model, name, evaluation=SUITE, **changes)


async def train(config, bus, suite, **options):
    async with asyncio.timeout(60):
        return await loop.run(config, bus, CLOCK, evaluator=suite, **options)


async def of(bus, kind):
    """Return the live decisions of a kind."""
    return [decision for decision in await live(bus) if isinstance(decision, kind)]


async def told(bus):
    """Return what was decided, without when an evaluation was noticed to have ended."""
    steps = [(d.step, d.position, d.digest) for d in await of(bus, StepDecided)]
    versions = [(d.step, d.version, d.digest) for d in await of(bus, VersionPublished)]
    found = [(d.step, d.version, d.purpose, d.scores) for d in await of(bus, Evaluated)]
    return steps, versions, found


async def announced(bus):
    control = await records_of(bus, CONTROL, TopicPartition("control", 0))
    return [record.version for record in control if isinstance(record, PolicyVersion)]


async def recorded_bus(**options):
    bus = await memory_bus()
    await record_trajectories(bus, **options)
    return bus


async def test_the_versions_of_every_so_many_steps_are_evaluated_and_written_down(model, tmp_path):
    """The one that the run begins with too; a record each in `decisions`, its figures in `metrics`."""
    bus, suite = await recorded_bus(), MadeUpSuite(lambda step, version: 20 + step)

    result = await train(config_of(tmp_path, model), bus, suite)

    assert [asked for asked in suite.asked if asked[0] is EVALUATION] == [(EVALUATION, n, n) for n in (0, 2, 4)]
    found = [d for d in await of(bus, Evaluated) if d.purpose is EVALUATION]
    assert [(d.step, d.version, d.scores.success) for d in found] == [(0, 0, 0.5), (2, 2, 0.55), (4, 4, 0.6)]
    assert [type(d) for _, d in await decisions(bus)][-2:] == [Evaluated, RunEnded]
    measured = await points(bus)
    success = [
        (p.step, p.value) for p in measured if p.name == "trainer.eval_success_mean" and p.labels["purpose"] != "gate"
    ]
    assert success == [(0, 0.5), (2, 0.55), (4, 0.6)]
    assert (result.steps, result.version, result.best_step) == (4, 4, 4)


@pytest.fixture(scope="module")
def calm(model, tmp_path_factory):
    """Return what a run that nothing disturbs decides."""

    async def whole():
        bus = await recorded_bus()
        await train(config_of(tmp_path_factory.mktemp("calm"), model), bus, MadeUpSuite())
        return await told(bus)

    return asyncio.run(whole())


async def test_the_next_version_is_held_until_the_evaluation_has_ended(model, calm, tmp_path):
    """Its step is decided and trained meanwhile; no clock decides what."""
    held = await recorded_bus()
    suite = MadeUpSuite()
    suite.hold[2] = asyncio.Event()
    training = asyncio.create_task(train(config_of(tmp_path, model, "held"), held, suite))

    async def decided():
        return len(await of(held, StepDecided))

    await wait_until(decided, 3, limit_s=50)
    directory = config_of(tmp_path, model, "held").checkpoints_directory
    assert (await announced(held), checkpoint.latest(directory).state.step) == ([0, 1, 2], 2)
    suite.hold[2].set()
    await training

    assert await told(held) == calm


async def test_evaluations_change_nothing_of_what_is_trained_on(model, tmp_path):
    """The same batches and weights as without; replay and the books know the records."""
    plain, evaluated = await recorded_bus(), await recorded_bus()
    await train(run_config(tmp_path, model, "plain"), plain, None)
    await train(config_of(tmp_path, model, "evaluated"), evaluated, MadeUpSuite())

    assert (await told(plain))[:2] == (await told(evaluated))[:2]
    assert (await replay(evaluated, CLOCK, RUN)).all_equal
    records = await live(evaluated)
    assert not [v for v in dispositions({}, {}, records, has_trainer=True).violations if "never admitted" not in v]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("step", [0, 2, 4])
async def test_a_trainer_that_died_while_it_evaluated_is_followed_by_one_that_does_it(
    model, calm, tmp_path, step, every
):
    """Only what was not written down is evaluated again, with the same version; then all is as if nobody had died."""
    bus = await recorded_bus()
    config, suite = config_of(tmp_path, model, checkpoints={"every": every}), MadeUpSuite()
    suite.hold[step] = asyncio.Event()
    training = asyncio.create_task(train(config, bus, suite))

    async def beside():
        return len(await of(bus, StepDecided))

    await wait_until(beside, min(step + 1, 4), limit_s=50)
    await wait_until(lambda: (EVALUATION, step, step) in suite.asked, True, limit_s=50)
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    again = MadeUpSuite()
    await train(config, bus, again, resume=True)

    assert await told(bus) == calm
    assert again.asked == [(EVALUATION, n, n) for n in (0, 2, 4) if n >= step]


async def test_an_error_of_the_evaluator_ends_the_trainer_and_a_resumed_one_goes_on(model, tmp_path):
    """Nothing is made up in its place."""
    bus, suite = await recorded_bus(), MadeUpSuite()
    config = config_of(tmp_path, model)
    await train(run_config(tmp_path, model, evaluation=SUITE, stop={"max_steps": 1}), bus, suite)
    suite.dies_at = Killed()
    with pytest.raises(Killed):
        await train(config, bus, suite, resume=True)

    assert [d.step for d in await of(bus, Evaluated) if d.purpose is EVALUATION] == [0]
    await train(config, bus, suite, resume=True)
    assert [d.step for d in await of(bus, Evaluated) if d.purpose is EVALUATION] == [0, 2, 4]


async def test_a_trainer_that_waits_for_an_evaluation_notices_its_successor(model, tmp_path, monkeypatch):
    """It does not hold a run that is no longer its own."""
    monkeypatch.setattr("trainer.evaluating.CHECK_EVERY_S", 0.01)
    bus, suite = await recorded_bus(), MadeUpSuite()
    suite.hold[2] = asyncio.Event()
    first = asyncio.create_task(train(config_of(tmp_path, model, "first"), bus, suite))
    await wait_until(lambda: (EVALUATION, 2, 2) in suite.asked, True, limit_s=50)

    await train(config_of(tmp_path, model, "second"), bus, MadeUpSuite(), resume=True)

    with pytest.raises(Fenced):
        await first
    assert sorted(d.step for d in await of(bus, Evaluated) if d.purpose is EVALUATION) == [0, 2, 4]


async def test_a_run_may_begin_to_evaluate_later_on(model, tmp_path):
    """Versions that were announced before are not evaluated."""
    bus, suite = await recorded_bus(), MadeUpSuite()
    await train(run_config(tmp_path, model, stop={"max_steps": 3}), bus, None)

    await train(config_of(tmp_path, model), bus, suite, resume=True)

    assert suite.asked == [(EVALUATION, 4, 4)]


async def test_a_live_run_is_evaluated_while_it_samples(model, tmp_path):
    """With one backend: the version that samples is the one that is evaluated, until that has ended."""
    bus, suite = await memory_bus(), MadeUpSuite()
    sampler = Sampler(bus)
    sampling = asyncio.create_task(sampler.run())
    await train(config_of(tmp_path, model, algorithm={"max_lag": 0}), bus, suite)
    await asyncio.wait_for(sampling, 30)

    assert [step for purpose, step, _ in suite.asked if purpose is EVALUATION] == [0, 2, 4]
    assert await announced(bus) == [0, 1, 2, 3, 4]


async def test_the_checkpoint_of_the_best_version_stays(model, tmp_path):
    """Others go when they are old: that of the best one is there to go back to."""
    bus, suite = await recorded_bus(groups=60), MadeUpSuite(lambda step, version: 30 if step == 2 else 20)
    config = config_of(tmp_path, model, stop={"max_steps": 6}, checkpoints={"keep": 1})

    await train(config, bus, suite)

    assert {int(path.name.split("-")[1]) for path in config.checkpoints_directory.iterdir()} == {2, 6}


async def test_a_run_with_a_suite_that_nobody_can_play_is_refused(model, tmp_path):
    """Before anything is written."""
    bus = await recorded_bus()
    with pytest.raises(ConfigError, match=r"start it by `rollmill train RUN\.toml`"):
        await train(config_of(tmp_path, model), bus, None)

    assert await decisions(bus) == []


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ('[evaluation]\ntasks = {family = "keydoor", count = 4}\n', "has an [evaluation], whose suite"),
        ('[guards.baseline]\nrule = "expert"\n', "has a guards.baseline without `bound`, whose rule"),
    ],
)
def test_the_bare_trainer_names_the_command_that_plays_what_it_cannot(tmp_path, section, says):
    """Before anything is connected or written; the same run, and only trained, is its own affair."""
    path = tmp_path / "RUN.toml"
    path.write_text(f'run = "{RUN}"\nmodel = "m"\ndirectory = "d"\n{section}')

    done = CliRunner().invoke(trainer_command, [str(path), "--bootstrap", "nobody:1"])

    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: run {RUN!r} {says}")
    assert f"Start it by `rollmill train {path}`" in done.stderr
