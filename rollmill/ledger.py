"""Places every sample of a run from the log itself, by the rules in `schemas`: for runs without ClickHouse.

`rollmill check` does the same by SQL; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

from infra.bus import Bus, TopicPartition
from infra.clock import Clock
from infra.errors import WaitTimeout
from infra.wire import Received, unpack
from schemas.arbiter import Arbiter, Ruling
from schemas.codec import DecodeError
from schemas.decisions import Decision, TrainerStarted, live_decisions
from schemas.dispositions import Key, Ledger, dispositions
from schemas.message import Message
from schemas.messages import Trajectory
from schemas.outcome import Outcome
from schemas.topics import DECISIONS, TASKS, TRAJECTORIES, Topic

M = TypeVar("M", bound=Message)

READ_S = 60.0
"""Longest wait for the end of a topic, seconds."""

POLL_S = 0.5
BATCH = 1_000


async def ledger(bus: Bus, clock: Clock, run: str) -> Ledger:
    """Return where every sample of a run is now."""
    # Against the flow: what a record rests on was written before it, so in a run that goes on no decision is seen
    # without its outcomes and no outcome without its task.
    log: list[tuple[int, Decision]] = [
        (found.record.offset, found.message) async for found in _read(bus, clock, DECISIONS) if found.message.run == run
    ]
    accepted: dict[Key, tuple[int, Outcome]] = {}
    async for done in _accepted(bus, clock, run):
        accepted[done.message.task.group, done.message.task.sample] = (done.record.offset, done.message.outcome)
    admitted: dict[Key, None] = {}
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
    arbiter = Arbiter()
    async for found in _read(bus, clock, TRAJECTORIES):
        task, offset = found.message.task, found.record.offset
        if task.run != run:
            continue
        if arbiter.rule(task.group, task.sample, task.payload_digest, offset) is Ruling.ACCEPTED:
            yield found


async def _read(bus: Bus, clock: Clock, topic: Topic[M]) -> AsyncIterator[Received[M]]:
    """Yield the messages of a topic up to its present end; what cannot be read is left out."""
    begin, end = await bus.begin_offsets(topic.name), await bus.end_offsets(topic.name)
    reader = await bus.read(_positions(topic, begin))
    until = clock.monotonic() + READ_S
    try:
        while any(reader.position(tp) < last for tp, last in _positions(topic, end).items()):
            for record in await reader.poll(BATCH, POLL_S):
                try:
                    yield await unpack(topic, record)
                except DecodeError:
                    continue
            if clock.monotonic() > until:
                raise WaitTimeout(f"waited {READ_S:g} s for the end of `{topic.name}`")
    finally:
        await reader.close()


def _positions(topic: Topic[Any], offsets: dict[int, int]) -> dict[TopicPartition, int]:
    return {TopicPartition(topic.name, part): offset for part, offset in offsets.items()}
