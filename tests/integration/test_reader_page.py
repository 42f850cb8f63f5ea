"""The trainer on the reader's page, as somebody would run it: against a real Kafka, killed and started again."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from infra.clock import SystemClock
from infra.kafka import KafkaBus
from infra.trajectories import trajectories_of
from infra.wire import Publisher
from schemas.topics import TABLE, TRAJECTORIES
from tests.golden.samples import SAMPLES
from tests.logs import wait_until
from tests.programs import block_of, printed

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reader.md"
PREFIX, RUN = "reader-page.", "my-run"


async def end(bus, group, sample):
    """Publish the graded end of a sample of two siblings."""
    done = SAMPLES["rollmill.trajectory"]
    task = msgspec.structs.replace(done.task, run=RUN, group=group, sample=sample, samples=2)
    await Publisher(bus, SystemClock(), "test").publish(TRAJECTORIES, msgspec.structs.replace(done, task=task))


async def position(bus):
    """Return how far the page's trainer says that it is."""
    known = (await bus.committed(f"my-trainer.{RUN}", TRAJECTORIES.name)).get(trajectories_of(RUN).partition)
    return known.offset if known else -1


async def test_the_pages_trainer_reads_each_group_once(kafka, tmp_path):
    """Groups that are mixed in the log, a duplicate, and a trainer killed with -9 between two of them."""
    script = tmp_path / "my_trainer.py"
    script.write_text(block_of(PAGE, "my_trainer.py").replace("run=run,", f'run=run, prefix="{PREFIX}",'))
    command = [sys.executable, "-u", str(script), kafka, RUN]
    bus = KafkaBus(kafka, prefix=PREFIX)
    await bus.start()
    try:
        await bus.create_topics(TABLE)
        for group, sample in (("a", 0), ("b", 0), ("a", 0), ("a", 1)):
            await end(bus, group, sample)
        options = {"cwd": ROOT, "env": {"PYTHONPATH": str(ROOT)}}
        first = await printed(command, 2, then=lambda: wait_until(lambda: position(bus), 1), **options)
        for group, sample in (("a", 1), ("b", 1), ("c", 1), ("c", 0)):
            await end(bus, group, sample)
        again = await printed(command, 4, **options)
    finally:
        await bus.close()

    assert ["a 0", "a 1"] == [" ".join(line.split()[:2]) for line in first]
    assert ["b 0", "b 1", "c 0", "c 1"] == [" ".join(line.split()[:2]) for line in again]
    assert {"-0.5 [5 6 2 7 2] [-0.5 -1.25 -0.0625 -2. -0.25 ]"} == {
        " ".join(line.split(maxsplit=2)[2].split()) for line in first + again
    }
