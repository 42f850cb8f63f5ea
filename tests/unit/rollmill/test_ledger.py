"""Where every sample of a run is, from the log itself."""

from __future__ import annotations

import pytest

from infra.clock import VirtualClock
from infra.memory import MemoryBus
from infra.wire import Publisher
from rollmill.ledger import find_trajectories, ledger
from schemas.decisions import DropReason, GroupDropped, Member, RunEnded, SampleRef, StepDecided, TrainerStarted
from schemas.messages import Trajectory
from schemas.outcome import Boundary, Completed, Expired, Failed, FailureKind
from schemas.partition import partition_for
from schemas.topics import DECISIONS, TABLE, TASKS, TRAJECTORIES
from tests.logs import make_task

CLOCK = VirtualClock()
DONE = Completed(components={"a": 1.0}, reward=1.0, success=1.0, truncated=False)
FAILED = Failed(kind=FailureKind.HANDLER, boundary=Boundary.HANDLER_ACT, cause="oops")
PARTITION = partition_for("r", TRAJECTORIES.partitions)
NEIGHBOUR = next(name for name in map(str, range(100)) if partition_for(name, TRAJECTORIES.partitions) == PARTITION)


class Log:
    """A run as a test writes it."""

    def __init__(self, bus):
        self.bus = bus
        self._publisher = Publisher(bus, CLOCK, "test")

    async def admit(self, group, **changes):
        await self._publisher.publish(TASKS, make_task(**{"run": "r", "group": group, **changes}))

    async def end(self, group, outcome=DONE, **changes):
        task = make_task(**{"run": "r", "group": group, **changes})
        trajectory = Trajectory(task=task, outcome=outcome, stage="eval")
        return (await self._publisher.publish(TRAJECTORIES, trajectory)).offset

    async def decide(self, decision):
        return (await self._publisher.publish(DECISIONS, decision)).offset

    async def start_trainer(self):
        return await self.decide(TrainerStarted(run="r", config={}, start=0, step=0))

    async def step(self, epoch, position, *members, **changes):
        made = tuple(Member(group=group, sample=0, offset=offset, content="c", reward=1.0) for group, offset in members)
        fields = {"step": 1, "digest": "d", "advantage_digest": "a", **changes}
        await self.decide(StepDecided(run="r", epoch=epoch, position=position, members=made, **fields))

    async def places(self):
        found = await ledger(self.bus, CLOCK, "r")
        return {group: place.value for (group, _), place in found.places.items()}, found.violations


@pytest.fixture
async def log():
    bus = MemoryBus(CLOCK)
    await bus.create_topics(TABLE)
    return Log(bus)


async def test_a_run_without_a_trainer_has_open_ended_and_unread_samples(log):
    """Each from a record of its own; a task published twice is one sample."""
    for group in ("open", "done", "failed", "expired", "open"):
        await log.admit(group)
    await log.end("done")
    await log.end("failed", FAILED)
    await log.end("expired", Expired(cause="late"))

    places = {"open": "open", "done": "unread", "failed": "failed", "expired": "expired"}
    assert (places, []) == await log.places()


async def test_a_trainers_decisions_place_what_it_read(log):
    """Trained, dropped by reason, buffered; what lies beyond its position is unread."""
    groups = ("trained", "filtered", "buffered", "unread")
    for group in groups:
        await log.admit(group)
    trained, filtered, buffered, _ = [await log.end(group) for group in groups]
    epoch = await log.start_trainer()
    dropped = (SampleRef(group="filtered", sample=0, offset=filtered),)
    await log.decide(
        GroupDropped(run="r", epoch=epoch, position=2, group="filtered", reason=DropReason.NO_VARIANCE, members=dropped)
    )
    waiting = (SampleRef(group="buffered", sample=0, offset=buffered),)
    await log.step(epoch, 3, ("trained", trained), buffered=waiting)

    assert ({group: group for group in groups}, []) == await log.places()


async def test_what_an_ended_run_did_not_use_is_unused(log):
    """The end names it."""
    await log.admit("unused")
    offset = await log.end("unused")
    epoch = await log.start_trainer()
    unused = (SampleRef(group="unused", sample=0, offset=offset),)
    await log.decide(RunEnded(run="r", epoch=epoch, position=1, step=0, reason="stopped", unused=unused))

    assert ({"unused": "unused"}, []) == await log.places()


async def test_the_decisions_of_a_trainer_that_was_replaced_do_not_count(log):
    """The epoch is the offset of the last trainer's start."""
    await log.admit("a")
    offset = await log.end("a")
    old = await log.start_trainer()
    new = await log.start_trainer()
    await log.step(old, 1, ("a", offset))
    assert ({"a": "unread"}, []) == await log.places()
    await log.step(new, 1, ("a", offset))

    assert ({"a": "trained"}, []) == await log.places()


async def test_only_the_first_record_of_a_sample_is_its_outcome(log):
    """Also when the second one is better; a record of another task is none."""
    await log.admit("a")
    await log.end("a", FAILED)
    await log.end("a")
    await log.end("a", payload={"other": True}, sample=1)

    assert ({"a": "failed"}, []) == await log.places()


async def test_other_runs_and_unreadable_records_are_left_out(log):
    """Even in the same partition."""
    await log.bus.publish(TASKS.name, b"\xc1", partition=0)
    await log.bus.publish(TRAJECTORIES.name, b"\xc1", partition=PARTITION)
    await log.admit("mine")
    await log.admit("theirs", run=NEIGHBOUR)
    await log.end("theirs", run=NEIGHBOUR)
    await log.end("mine")

    assert ({"mine": "unread"}, []) == await log.places()
    assert ["mine"] == [found.task.group async for found in find_trajectories(log.bus, CLOCK, "r")]


async def test_a_record_without_a_task_is_a_violation(log):
    """Nothing is trained on that was never asked for."""
    await log.end("stranger")

    places, violations = await log.places()
    assert ({}, ["('stranger', 0): has a record or a decision, but was never admitted"]) == (places, violations)


async def test_a_sample_that_was_read_and_is_in_no_decision_is_a_violation(log):
    """It would be lost silently."""
    await log.admit("lost")
    await log.end("lost")
    epoch = await log.start_trainer()
    await log.step(epoch, 1)

    places, violations = await log.places()
    assert ({}, ["('lost', 0): read at offset 0 but in no decision"]) == (places, violations)


async def test_accepted_trajectories_come_in_log_order(log):
    """Each sample once."""
    for group in ("b", "a", "b", "c"):
        await log.end(group)

    assert ["b", "a", "c"] == [found.task.group async for found in find_trajectories(log.bus, CLOCK, "r")]


async def test_a_run_that_goes_on_while_it_is_read_has_no_violations():
    """A sample may be admitted, end and be trained on between any two of our reads."""

    class Busy(MemoryBus):
        """A log in which a whole sample passes each time that somebody asks for the end of a topic."""

        samples = 0
        busy = False

        async def end_offsets(self, topic):
            found = await super().end_offsets(topic)
            if not self.busy:
                self.busy, self.samples = True, self.samples + 1
                group = f"g{self.samples}"
                await log.admit(group)
                offset = await log.end(group)
                await log.step(epoch, offset + 1, (group, offset), step=self.samples)
                self.busy = False
            return found

    bus = Busy(CLOCK)
    await bus.create_topics(TABLE)
    log = Log(bus)
    epoch = await log.start_trainer()
    for _ in range(5):
        _, violations = await log.places()
        assert [] == violations
