"""What is told of a run beside its log, and that it never changes the run."""

from __future__ import annotations

import asyncio

import pytest
from suites import SUITE, MadeUpSuite
from synthetic_run import (
    Killed,
    MortalBus,
    live,
    memory_bus,
    points,
    record_trajectories,
    run_config,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from infra.clock import SystemClock
from schemas.decisions import StepDecided, VersionPublished
from trainer import loop

CLOCK = SystemClock()


async def trained(config, *, bus=None, **options):
    """Train on a made-up log; return what each step and version was."""
    if bus is None:
        bus = await memory_bus()
        await record_trajectories(bus)
    async with asyncio.timeout(60):
        await loop.run(config, bus, CLOCK, **options)
    return [
        (decision.step, decision.digest)
        for decision in await live(bus)
        if isinstance(decision, StepDecided | VersionPublished)
    ]


async def test_rollouts_of_some_steps_are_written_and_printed_and_nothing_is_trained_otherwise(model, tmp_path):
    """Every second step has a file; batches and weights are those of a run that tells nothing."""
    printed = []
    config = run_config(tmp_path, model, report={"rollouts_every": 2})
    told = await trained(config, on_rollouts=printed.append)
    silent = await trained(run_config(tmp_path, model, "silent"))

    assert told == silent
    files = sorted((config.directory / "rollouts").iterdir())
    assert [file.name for file in files] == ["step-000002.txt", "step-000004.txt"]
    assert not (tmp_path / "silent" / "rollouts").exists()
    text = files[0].read_text()
    assert text.startswith("== step 2, best")
    assert {"worst", "longest", "random"} <= {word.strip(":,") for word in text.split()}
    assert "said | w" in text
    assert [text.splitlines()[-1] for text in printed] == [f"in full: {file}" for file in files]


async def test_rollouts_that_cannot_be_written_do_not_end_the_run(model, tmp_path, caplog):
    """It is said once."""
    config = run_config(tmp_path, model, report={"rollouts_every": 1})
    config.directory.mkdir()
    (config.directory / "rollouts").write_text("in the way")
    steps = await trained(config)

    assert steps[-1][0] == 4
    said = [record.message for record in caplog.records if "goes on without rollouts" in record.message]
    assert len(said) == 1


# ---- curves


def drawn(config):
    """Return name -> [(step, value)] as TensorBoard reads them."""
    events = EventAccumulator(str(config.directory / "tensorboard"), {"scalars": 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


async def test_tensorboard_has_each_steps_figures_as_metrics_has_them(model, tmp_path):
    """A label is part of the name; evaluations are there too."""
    bus = await memory_bus()
    await record_trajectories(bus)
    config = run_config(tmp_path, model, report={"writers": ["tensorboard"]}, evaluation=SUITE)
    await trained(config, bus=bus, evaluator=MadeUpSuite(lambda step, version: 20 + step))

    curves = drawn(config)
    published = await points(bus)
    for name, label in [("reward_mean", ""), ("loss", ""), ("eval_success_mean", "evaluation")]:
        expected = [
            (point.step, pytest.approx(point.value))
            for point in published
            if point.name == f"trainer.{name}" and label in {"", *point.labels.values()}
        ]
        assert sorted(curves[f"trainer/{name}{f'/{label}' if label else ''}"]) == expected
        assert expected
    assert [step for step, _ in curves["trainer/reward_component_mean/done"]] == [1, 2, 3, 4]


@pytest.mark.parametrize("at", [9, 13, 17])
async def test_a_curve_has_each_step_once_after_a_kill(model, tmp_path, at):
    """Steps behind the last checkpoint are made again, and drawn in the place of what was there."""
    bus = await memory_bus()
    await record_trajectories(bus)
    config = run_config(tmp_path, model, report={"writers": ["tensorboard"]}, checkpoints={"every": 3})
    with pytest.raises(Killed):
        await trained(config, bus=MortalBus(bus, at, after=True))
    await trained(config, bus=bus, resume=True)

    curves = drawn(config)
    for name in ("trainer/loss", "trainer/reward_mean"):
        assert [step for step, _ in curves[name]] == [1, 2, 3, 4]


async def test_a_run_that_went_back_draws_its_new_steps_and_not_those_undone(model, tmp_path):
    """Its learning rate of before is gone from the curve."""
    bus = await memory_bus()
    await record_trajectories(bus, groups=60)
    common = {"report": {"writers": ["tensorboard"]}, "checkpoints": {"keep": 9}}
    await trained(run_config(tmp_path, model, **common), bus=bus)
    config = run_config(tmp_path, model, **common, algorithm={"lr": 0.001}, stop={"max_steps": 5})
    await trained(config, bus=bus, rollback=2)

    rates = drawn(config)["trainer/learning_rate"]
    assert [(step, round(value, 6)) for step, value in rates] == [(1, 3e-4), (2, 3e-4), (3, 1e-3), (4, 1e-3), (5, 1e-3)]


async def test_a_writer_that_fails_does_not_end_the_run(model, tmp_path, caplog):
    """It is said once, and the run trains the same."""
    config = run_config(tmp_path, model, report={"writers": ["tensorboard"]})
    config.directory.mkdir()
    (config.directory / "tensorboard").write_text("in the way")
    told = await trained(config)

    assert told == await trained(run_config(tmp_path, model, "silent"))
    assert len([r for r in caplog.records if "goes on without tensorboard" in r.message]) == 1
