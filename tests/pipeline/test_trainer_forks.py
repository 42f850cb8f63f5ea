"""A run that must become another one: it is refused, and forked."""

from __future__ import annotations

import asyncio

import pytest
from synthetic_run import decisions, memory_bus, record_trajectories, run_config

from infra.clock import SystemClock
from infra.errors import ConfigError
from infra.wire import Publisher
from rollmill.commands.train import anchored, run_toml_of
from schemas.decisions import ForkedFrom, StepDecided, TrainerStarted, VersionPublished
from schemas.topics import TRAJECTORIES
from tests.pipeline.synthetic_run import task, trajectory
from trainer import checkpoint, loop
from trainer.config import load_config
from trainer.fork import RUN_FILE, fork
from trainer.models import Shape, create_wordlevel_model
from trainer.weights import weights_digest

CLOCK = SystemClock()


async def train(config, bus, **options):
    async with asyncio.timeout(60):
        return await loop.run(config, bus, CLOCK, **options)


@pytest.fixture
async def trained(model, tmp_path):
    """Return (bus, configuration) of a run of two steps."""
    bus, config = await memory_bus(), run_config(tmp_path, model, stop={"max_steps": 2})
    await record_trajectories(bus)
    await train(config, bus)
    return bus, config


async def test_a_resumed_run_writes_down_what_it_changed(trained, model, tmp_path):
    """The configuration of each trainer lies in its TrainerStarted."""
    bus, _ = trained
    await train(run_config(tmp_path, model, stop={"max_steps": 3}, algorithm={"lr": 1e-5}), bus, resume=True)

    rates = [d.config["algorithm"]["lr"] for _, d in await decisions(bus) if isinstance(d, TrainerStarted)]
    assert rates == [3e-4, 1e-5]


async def test_another_model_is_refused_before_anything_is_written(trained, tmp_path):
    """Same shape, other weights: the error names the fork, and no trainer has started."""
    bus, _ = trained
    shape = Shape(hidden=16, layers=1, heads=2, intermediate=32, context=64)
    create_wordlevel_model(tmp_path / "other", seed=9, words=[f"w{i}" for i in range(13)], shape=shape)
    before = await decisions(bus)

    with pytest.raises(ConfigError, match=r"model_digest was .* --fork NEW_RUN"):
        await train(run_config(tmp_path, tmp_path / "other"), bus, resume=True)

    assert await decisions(bus) == before


async def test_a_fork_begins_with_the_weights_of_the_checkpoint_and_decides_for_itself(trained, tmp_path):
    """Another seed and reward constant; its first version has the old run's last weights; the old run is as it was."""
    bus, old = trained
    before = await decisions(bus)
    other = old.model_copy(update={"seed": 5, "tasks": {"jsonl": "tasks.jsonl", "repeat": True}})

    forked = await fork(anchored(other, tmp_path), "new", bus, CLOCK, run_toml_of)
    publisher = Publisher(bus, CLOCK, "test")
    for number in range(4):
        for sample in range(3):
            what = trajectory(task(number, sample, run="new"), float(sample == 0), seed=7)
            await publisher.publish(TRAJECTORIES, what)
    result = await train(forked, bus)

    said = [d for _, d in await decisions(bus, "new")]
    saved = checkpoint.latest(old.checkpoints_directory)
    last = [d for _, d in before if isinstance(d, VersionPublished)][-1]
    assert said[0].forked_from == ForkedFrom(run="r", epoch=saved.state.epoch, step=2, weights=last.digest)
    assert next(d.digest for d in said if isinstance(d, VersionPublished)) == last.digest
    assert [d.step for d in said if isinstance(d, StepDecided)] == [1, 2]
    assert (result.steps, await decisions(bus)) == (2, before)


async def test_a_fork_has_a_run_toml_that_says_the_same(trained, tmp_path):
    """For its feeder, and to go on with it from any folder."""
    bus, old = trained
    other = anchored(old.model_copy(update={"tasks": {"jsonl": "tasks.jsonl"}}), tmp_path)

    forked = await fork(other, "new", bus, CLOCK, run_toml_of)

    assert load_config(forked.directory / RUN_FILE) == forked
    assert (forked.directory, forked.model) == (tmp_path / "new", tmp_path / "new" / "model")
    assert forked.tasks["jsonl"] == str(tmp_path / "tasks.jsonl")


async def test_a_fork_that_cannot_be_says_why_and_leaves_nothing_behind(trained, model, tmp_path):
    """Its own name, a taken one, no checkpoint, a model of another shape."""
    bus, old = trained
    (tmp_path / "taken").mkdir()
    create_wordlevel_model(tmp_path / "wide", seed=0, words=[f"w{i}" for i in range(40)])
    files = sorted(tmp_path.iterdir())
    nowhere = old.model_copy(update={"directory": tmp_path / "nowhere"})
    wide = old.model_copy(update={"model": tmp_path / "wide"})

    for config, name, why in (
        (old, "r", "a name of its own"),
        (old, "taken", "taken exists"),
        (nowhere, "new", "has no checkpoint in"),
        (wide, "new", "do not fit the model"),
    ):
        with pytest.raises(ConfigError, match=why):
            await fork(config, name, bus, CLOCK, run_toml_of)

    assert sorted(tmp_path.iterdir()) == files


async def test_a_fork_of_a_run_with_adapters_begins_with_them_merged(model, tmp_path):
    """It has the weights of the last version, whether or not it trains adapters itself."""
    bus = await memory_bus()
    old = run_config(tmp_path, model, stop={"max_steps": 2}, algorithm={"lora": {"rank": 2}, "lr": 1e-2})
    await record_trajectories(bus)
    await train(old, bus)
    last = [d for _, d in await decisions(bus) if isinstance(d, VersionPublished)][-1]

    again = await fork(old, "again", bus, CLOCK, run_toml_of)
    whole = old.model_copy(update={"algorithm": old.algorithm.model_copy(update={"lora": None})})
    other = await fork(whole, "other", bus, CLOCK, run_toml_of)

    assert load_config(again.directory / RUN_FILE).algorithm.lora == old.algorithm.lora
    for forked in (again, other):
        assert forked.forked_from.weights == last.digest
        assert weights_digest((forked.model / "model.safetensors").read_bytes()) == last.digest
    wide = old.model_copy(update={"model": tmp_path / "wide"})
    create_wordlevel_model(tmp_path / "wide", seed=0, words=[f"w{i}" for i in range(40)])
    with pytest.raises(ConfigError, match="is of another model"):
        await fork(wide, "new", bus, CLOCK, run_toml_of)
