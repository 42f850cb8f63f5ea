"""Token records wait in memory as far as they fit; the rest is read again, and is the same."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from infra.clock import SystemClock
from infra.memory import MemoryBus
from infra.trajectories import read_trajectory, trajectories_of
from infra.wire import Publisher
from schemas.codec import encode
from schemas.messages import Trajectory
from schemas.outcome import Completed
from schemas.topics import TABLE, TRAJECTORIES
from schemas.transcript import Transcript, pack_logprobs, pack_tokens
from tests.logs import make_task
from trainer.group import Group
from trainer.groups import Step
from trainer.spool import ChangedLog, Spool, size_of
from trainer.terminal import terminal

CLOCK = SystemClock()
DONE = Completed(components={}, reward=1.0, success=1.0, truncated=False)


def transcript(seed, length=50):
    zeros = np.zeros(length)
    return Transcript(
        tokens=pack_tokens(np.full(length, seed)),
        mask=zeros.astype(np.uint8).tobytes(),
        logprobs=pack_logprobs(zeros),
        spans=(),
        turns=(),
    )


@pytest.fixture
async def log():
    """A bus with ten trajectories of the run, one of another run between each two, and what the trainer read."""
    bus = MemoryBus(CLOCK)
    await bus.create_topics(TABLE)
    publisher = Publisher(bus, CLOCK, "test")
    partition = trajectories_of("r")
    for number in range(10):
        for run in ("r", "other"):
            task = msgspec.structs.replace(make_task(run=run), group=f"g{number}")
            made = Trajectory(task=task, outcome=DONE, transcript=transcript(number), stage="eval")
            await publisher.publish(TRAJECTORIES, made, partition=partition.partition)
    reader = await bus.read({partition: 0})
    found = [await read_trajectory(record, "r", bus) for record in await reader.poll(100, 0)]
    await reader.close()
    return bus, [received for received in found if received is not None]


def step_of(terminals, buffered=()):
    groups = tuple(Group(id=t.group, admission=None, first=t.offset, completed=(t,), excluded=0) for t in terminals)
    return Step(
        number=1, groups=groups, advantages=np.zeros(1), position=99, buffered=buffered, missing=0, recorded=None
    )


def spooled(bus, records, most_bytes):
    spool = Spool(bus, CLOCK, "r", most_bytes)
    terminals = [terminal(received, None, keep_tokens=False) for received in records]
    for at, received in zip(terminals, records, strict=True):
        spool.put(at.offset, received.message.transcript)
    return spool, terminals


@pytest.mark.parametrize("fit", [0, 1, 4, 10])
async def test_a_step_has_the_same_token_records_however_few_fit_into_memory(log, fit):
    """What came first is kept; what did not fit is read again, and nothing is left afterwards."""
    bus, records = log
    spool, terminals = spooled(bus, records, fit * size_of(transcript(0)))

    assert spool.bytes <= fit * size_of(transcript(0))
    filled = await spool.fill(step_of(terminals))

    assert [t.transcript for t in filled.terminals] == [received.message.transcript for received in records]
    assert (spool.read_again, spool.bytes) == (10 - fit, 0)
    assert filled.digest == step_of(terminals).digest


async def test_what_still_waits_is_kept_over_a_step_and_the_rest_is_forgotten(log):
    """A record that was superseded, or whose group was closed, holds no memory."""
    bus, records = log
    spool, terminals = spooled(bus, records, 10**6)

    await spool.fill(step_of(terminals[:2], buffered=tuple(t.ref for t in terminals[2:5])))
    assert spool.bytes == 3 * size_of(transcript(0))
    spool.drop(t.offset for t in terminals)
    assert spool.bytes == 0


async def test_a_record_that_changed_meanwhile_is_an_error(log):
    """A batch is trained on as it was decided, or not at all."""
    bus, records = log
    spool, terminals = spooled(bus, records, 0)
    other = msgspec.structs.replace(records[3].message, transcript=transcript(77))
    bus.log.rewrite(trajectories_of("r"), terminals[3].offset, lambda _: encode(other))

    with pytest.raises(ChangedLog, match=f"offset {terminals[3].offset} .* no longer holds the same record"):
        await spool.fill(step_of(terminals))


async def test_a_sample_that_was_graded_without_tokens_stays_without(log):
    """It counts in the baseline."""
    bus, records = log
    bare = msgspec.structs.replace(records[0].message, transcript=None)
    position = await Publisher(bus, CLOCK, "test").publish(TRAJECTORIES, bare)
    reader = await bus.read({trajectories_of("r"): position.offset})
    received = await read_trajectory((await reader.poll(1, 0))[0], "r", bus)
    await reader.close()

    spool = Spool(bus, CLOCK, "r", 10**6)
    filled = await spool.fill(step_of([terminal(received, None, keep_tokens=False)]))

    assert [t.transcript for t in filled.terminals] == [None]
