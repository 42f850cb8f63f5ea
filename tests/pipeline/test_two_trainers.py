"""Two trainers of one run by mistake: the later one goes on, and nothing that the earlier one still says counts."""

from __future__ import annotations

import asyncio
import sys

import pytest
from synthetic_run import RUN, SAMPLES, decisions, live, memory_bus, record_trajectories, run_config, task

from infra.clock import SystemClock
from infra.control import ControlView
from infra.kafka import KafkaBus
from infra.wire import Publisher
from producers.publish import publish_tasks
from rollmill.ledger import ledger
from rollmill.watch import RunWatch
from schemas.control import Credit, PolicyVersion
from schemas.decisions import (
    DropReason,
    GroupDropped,
    RunEnded,
    StepDecided,
    TrainerStarted,
    VersionPublished,
)
from schemas.topics import CONTROL, DECISIONS, TABLE
from tests.logs import wait_until
from trainer import loop
from trainer.decision_log import decisions_of
from trainer.history import History
from trainer.replay import replay

CLOCK = SystemClock()
PREFIX = "two-trainers."


async def train(config, bus, **options):
    async with asyncio.timeout(60):
        return await loop.run(config, bus, CLOCK, **options)


async def as_read(bus):
    """Return what every reader of decisions and control makes of the log now."""
    view = ControlView(bus, CLOCK)
    await view.start()
    await view.close()
    books = await ledger(bus, CLOCK, RUN)
    return {
        "history": History.of(await decisions(bus)),
        "ledger": (books.counts(), books.violations),
        "replay": await replay(bus, CLOCK, RUN),
        "credit": view.get(f"credit/{RUN}", Credit),
        "policy": view.get(f"policy/{RUN}", PolicyVersion),
    }


async def speak_late(bus, epoch):
    """Say everything that a trainer says, as one that another has replaced."""
    publisher = Publisher(bus, CLOCK, "zombie")
    words = {"run": RUN, "epoch": epoch}
    for late in (
        StepDecided(**words, step=4, position=999, members=(), digest="d", advantage_digest="a", buffered=()),
        GroupDropped(**words, position=999, group=task(29, 0).group, reason=DropReason.STALE, members=()),
        VersionPublished(**words, step=4, version=99, digest="w"),
        RunEnded(**words, position=999, step=4, reason="it thinks so", unused=()),
    ):
        await publisher.publish(DECISIONS, late)
    for late in (
        Credit(**words, admit_up_to=9_999, min_version=99, horizon=1, temperature=9.0, closed=True),
        PolicyVersion(**words, version=99, directory="/nowhere", digest="w"),
    ):
        await publisher.publish(CONTROL, late)


async def test_what_a_replaced_trainer_still_says_is_ignored_by_every_reader(model, tmp_path):
    """Steps, drops, versions, the end, credit: books, replay, watch, policy, feeder and the next trainer see none."""
    bus = await memory_bus()
    admitted = [task(number, sample) for number in range(30) for sample in range(SAMPLES)]
    await publish_tasks(Publisher(bus, CLOCK, "test"), admitted)
    await record_trajectories(bus, groups=30)
    await train(run_config(tmp_path, model, "old", stop={"max_steps": 2}), bus)
    watch = RunWatch(bus, CLOCK, RUN)
    await watch.start()
    watching = asyncio.create_task(watch.follow())
    await train(run_config(tmp_path, model, "new", stop={"max_steps": 3}), bus, resume=True)
    old, new = (offset for offset, said in await decisions(bus) if isinstance(said, TrainerStarted))
    before = await as_read(bus)
    await speak_late(bus, old)
    after = await as_read(bus)
    result = await train(run_config(tmp_path, model, "new", stop={"max_steps": 4}), bus, resume=True)
    await wait_until(lambda: watch.state.step, 4)
    await wait_until(lambda: watch.state.ended, "4 steps made")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)

    assert before == after
    assert ("3/3 digests equal", []) == (after["replay"].summary(), after["ledger"][1])
    assert (new, new, 3) == (after["credit"].epoch, after["policy"].epoch, after["policy"].version)
    assert (4, 4, "4 steps made") == (result.steps, result.version, result.reason)
    assert (2, 4, 4) == (watch.state.trainers, watch.state.step, watch.state.version)


@pytest.mark.slow
@pytest.mark.integration
async def test_the_process_of_a_replaced_trainer_ends_with_a_message(model, tmp_path, kafka):
    """Started again elsewhere by mistake: the first process says what happened, and the other one goes on."""
    bus = KafkaBus(kafka, prefix=PREFIX)
    await bus.start()
    trainers = []

    async def start(name, *options):
        path = tmp_path / f"{name}.toml"
        path.write_text(f'run = "{RUN}"\nmodel = "{model}"\ndirectory = "{name}"\n[algorithm]\nsamples = 3\n')
        command = (sys.executable, "-m", "trainer", str(path), "--bootstrap", kafka, "--prefix", PREFIX, *options)
        trainers.append(await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE))
        return trainers[-1]

    async def announced():
        reader = await bus.read({decisions_of(RUN): 0})
        try:
            async with asyncio.timeout(300):
                while not [r for r in await reader.poll(100, 0.5) if b"rollmill.version" in r.value]:
                    pass
        finally:
            await reader.close()

    try:
        await bus.create_topics(TABLE)
        first = await start("one")
        await announced()
        await start("two", "--resume")
        _, said = await asyncio.wait_for(first.communicate(), 300)
        decided = [type(decision) for decision in await live(bus)]
    finally:
        for trainer in trainers:
            if trainer.returncode is None:
                trainer.kill()
                await trainer.communicate()
        await bus.close()

    assert (1, True) == (first.returncode, b"another trainer took run 'r' over" in said)
    assert decided.count(TrainerStarted) == 2
