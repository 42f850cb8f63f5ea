import asyncio
import os
import signal
import sys

import pytest
from synthetic_run import RUN, decisions, live, record_trajectories, run_config, small_model

from infra.clock import SystemClock
from infra.kafka import KafkaBus
from schemas.decisions import RunEnded, StepDecided, TrainerStarted
from schemas.topics import TABLE
from trainer.replay import replay

pytestmark = pytest.mark.integration

PREFIX = "trainer-kafka."
STEPS = 12


def run_toml(tmp_path):
    """Write the configuration of a run of twelve small steps."""
    config = run_config(tmp_path, tmp_path / "model", stop={"max_steps": STEPS})
    algorithm = config.algorithm
    path = tmp_path / "RUN.toml"
    path.write_text(
        f'run = "{RUN}"\nmodel = "model"\ndirectory = "one"\n'
        f"[algorithm]\ngroups = {algorithm.groups}\nsamples = {algorithm.samples}\nmax_lag = {algorithm.max_lag}\n"
        f"epochs = 1\nminibatches = 1\nmin_siblings = 2\n[stop]\nmax_steps = {STEPS}\n"
    )
    return path


async def start_trainer(path, address, *options):
    """Start the trainer as a process."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "trainer", str(path), "--bootstrap", address, "--prefix", PREFIX, *options),
        stderr=asyncio.subprocess.PIPE,
    )


async def until_step(bus, step):
    """Wait until a step is decided."""
    async with asyncio.timeout(120):
        while not any(isinstance(d, StepDecided) and d.step >= step for _, d in await decisions(bus)):
            await asyncio.sleep(0)


async def test_a_trainer_process_killed_between_steps_is_resumed_and_replays(tmp_path, kafka):
    """kill -9 of the real process on a real Kafka: every step once, and all digests equal."""
    small_model(tmp_path / "model")
    path = run_toml(tmp_path)
    bus = KafkaBus(kafka, prefix=PREFIX)
    await bus.start()
    try:
        await bus.create_topics(TABLE)
        await record_trajectories(bus, groups=60)

        first = await start_trainer(path, kafka)
        await until_step(bus, 2)
        os.kill(first.pid, signal.SIGKILL)
        await first.communicate()
        second = await start_trainer(path, kafka, "--resume")
        _, said = await asyncio.wait_for(second.communicate(), 180)
        assert second.returncode == 0, said.decode()

        said = await live(bus)
        report = await replay(bus, SystemClock(), RUN)
    finally:
        await bus.close()

    assert sum(isinstance(d, TrainerStarted) for d in said) == 2
    assert [d.step for d in said if isinstance(d, StepDecided)] == list(range(1, STEPS + 1))
    assert isinstance(said[-1], RunEnded)
    assert report.summary() == f"{STEPS}/{STEPS} digests equal"
