import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from synthetic_run import RUN, decisions, live, memory_bus, record_trajectories, run_config, small_model

from infra.clock import SystemClock
from infra.kafka import KafkaBus
from schemas.decisions import RunEnded, StepDecided
from schemas.topics import TABLE
from trainer.loop import run
from trainer.replay import replay

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PREFIX = "trainer-ranks."
STEPS = 8
FIRST, ALL = 12, 40
"""Groups there are at first, enough for a few steps but not for all, and in the end."""
LIMIT_S = 300.0
"""Longest wait for a step or an end, seconds: each rank imports torch, on a machine that may be busy."""


def run_toml(tmp_path):
    """Write the configuration of a run of a few small steps, and return it with its file."""
    config = run_config(tmp_path, tmp_path / "model", stop={"max_steps": STEPS})
    path = tmp_path / "RUN.toml"
    path.write_text(
        f'run = "{RUN}"\nmodel = "model"\ndirectory = "two"\n'
        f"[algorithm]\ngroups = 2\nsamples = {config.algorithm.samples}\nmax_lag = 99\n"
        f"epochs = 1\nminibatches = 1\nmin_siblings = 2\n[stop]\nmax_steps = {STEPS}\n"
    )
    return config, path


@asynccontextmanager
async def two_ranks(path, address, *options):
    """Two ranks of the trainer and what started them, for no longer than the block."""
    launcher = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "trainer", str(path), "--bootstrap", address, "--prefix", PREFIX, *options),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        yield launcher
    finally:
        if launcher.returncode is None:
            # It ends its ranks before itself; killed, it would leave them behind.
            launcher.terminate()
            await launcher.communicate()


def ranks_of(launcher):
    """Return rank -> process id of what a launcher has started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    found = {}
    for pid in children:
        environment = dict(e.partition("=")[::2] for e in Path(f"/proc/{pid}/environ").read_text().split("\0"))
        if "RANK" in environment:
            found[int(environment["RANK"])] = int(pid)
    return found


async def until_step(bus, step, launcher):
    """Wait until a step is decided."""
    async with asyncio.timeout(LIMIT_S):
        while not any(isinstance(d, StepDecided) and d.step >= step for _, d in await decisions(bus)):
            assert launcher.returncode is None, (await launcher.communicate())[1].decode()
            await asyncio.sleep(0)


def last_weights(directory):
    """Return the weights of the last version in a directory."""
    return load_file(max(directory.glob("v*-*")) / "model.safetensors")


async def test_two_ranks_of_which_one_is_killed_are_resumed_and_train_as_one_does(tmp_path, kafka):
    """The other rank does not outlive it; every step once, all digests equal, weights those of one rank to 1e-5."""
    small_model(tmp_path / "model")
    config, path = run_toml(tmp_path)
    bus = KafkaBus(kafka, prefix=PREFIX)
    await bus.start()
    try:
        await bus.create_topics(TABLE)
        await record_trajectories(bus, groups=FIRST)

        async with two_ranks(path, kafka) as launcher:
            await until_step(bus, 2, launcher)
            ranks = ranks_of(launcher)
            os.kill(ranks[1], signal.SIGKILL)
            _, said = await asyncio.wait_for(launcher.communicate(), LIMIT_S)
        assert launcher.returncode != 0, said.decode()
        assert not Path(f"/proc/{ranks[0]}").exists()
        await record_trajectories(bus, groups=ALL)
        async with two_ranks(path, kafka, "--resume") as launcher:
            _, said = await asyncio.wait_for(launcher.communicate(), LIMIT_S)
        assert launcher.returncode == 0, said.decode()

        said = await live(bus)
        report = await replay(bus, SystemClock(), RUN)
    finally:
        await bus.close()
    memory = await memory_bus()
    await record_trajectories(memory, groups=FIRST)
    await record_trajectories(memory, groups=ALL)
    await run(config, memory, SystemClock())

    assert [d.step for d in said if isinstance(d, StepDecided)] == list(range(1, STEPS + 1))
    assert isinstance(said[-1], RunEnded)
    assert report.summary() == f"{STEPS}/{STEPS} digests equal"
    wanted = last_weights(config.versions_directory)
    for name, tensor in last_weights(tmp_path / "two" / "versions").items():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-5, rtol=0)
