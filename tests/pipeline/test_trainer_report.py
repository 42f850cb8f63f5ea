"""What is told of a run beside its log, and that it never changes the run."""

from __future__ import annotations

import asyncio

import pytest
from synthetic_run import decisions, memory_bus, record_trajectories, run_config, small_model

from infra.clock import SystemClock
from schemas.decisions import StepDecided, VersionPublished, live_decisions
from trainer import loop

CLOCK = SystemClock()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the directory of a small model."""
    directory = tmp_path_factory.mktemp("model") / "m"
    small_model(directory)
    return directory


async def trained(config, *, bus=None, **options):
    """Train on a made-up log; return what each step and version was."""
    if bus is None:
        bus = await memory_bus()
        await record_trajectories(bus)
    async with asyncio.timeout(60):
        await loop.run(config, bus, CLOCK, **options)
    return [
        (decision.step, decision.digest)
        for _, decision in live_decisions(await decisions(bus))
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
    said = [record.message for record in caplog.records if "goes on without its rollouts" in record.message]
    assert len(said) == 1
