"""Places every sample of a run from the log itself, by the rules in `schemas`: for runs without ClickHouse.

`rollmill check` does the same by SQL; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from infra.bus import Bus
from infra.clock import Clock
from infra.reading import positions, read_between
from infra.trajectories import TrajectoryReader, trajectories_of
from infra.wire import Received, unpack
from schemas.codec import DecodeError
from schemas.decisions import Decision, TrainerStarted, live_decisions
from schemas.dispositions import REPLAYED, Key, Ledger, dispositions
from schemas.message import Message
from schemas.messages import Trajectory
from schemas.outcome import Outcome
from schemas.topics import DECISIONS, TASKS, TRAJECTORIES, Topic

M = TypeVar("M", bound=Message)


async def ledger(bus: Bus, clock: Clock, run: str) -> Ledger:
    """Return where every sample of a run is now."""
    # Against the flow: what a record rests on was written before it, so in a run that goes on no decision is seen
    # without its outcomes and no outcome without its task.
    log: list[tuple[int, Decision]] = [
        (found.record.offset, found.message) async for found in _read(bus, clock, DECISIONS) if found.message.run == run
    ]
    accepted: dict[Key, tuple[int, Outcome]] = {}
    admitted: dict[Key, None] = {}
    async for done in _accepted(bus, clock, run):
        key = (done.message.task.group, done.message.task.sample)
        accepted[key] = (done.record.offset, done.message.outcome)
        if done.message.stage == REPLAYED:
            admitted[key] = None
    async for task in _read(bus, clock, TASKS):
        if task.message.run == run:
            admitted[task.message.group, task.message.sample] = None
    live = [decision for _, decision in live_decisions(log)]
    has_trainer = any(isinstance(decision, TrainerStarted) for decision in live)
    return dispositions(admitted, accepted, live, has_trainer=has_trainer)


async def find_trajectories(bus: Bus, clock: Clock, run: str) -> AsyncIterator[Trajectory]:
    """Yield the accepted trajectories of a run that are in the log now, in log order."""
    async for found in _accepted(bus, clock, run):
        yield found.message


async def _accepted(bus: Bus, clock: Clock, run: str) -> AsyncIterator[Received[Trajectory]]:
    begin = (await bus.begin_offsets(TRAJECTORIES.name))[trajectories_of(run).partition]
    async with TrajectoryReader.on(bus, clock, run, start=begin) as reader:
        async for found in reader.received(follow=False):
            yield found


async def _read(bus: Bus, clock: Clock, topic: Topic[M]) -> AsyncIterator[Received[M]]:
    """Yield the messages of a topic up to its present end; what cannot be read is left out."""
    begin, end = await bus.begin_offsets(topic.name), await bus.end_offsets(topic.name)
    async for record in read_between(bus, clock, positions(topic, begin), positions(topic, end)):
        try:
            yield await unpack(topic, record, bus)
        except DecodeError:
            continue  # it says nothing about any run; its stage or the sink has it in `dead`
