"""Tasks in, outcomes out: how a benchmark gives the pipeline work and knows that it is done.

A round is a run of its own name, so that its records are told apart in the log. Outcomes are counted by the subject
in their headers; a sample counts once, however often the log holds it. Nothing here knows the stages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from infra.bus import Bus, Record, TopicPartition
from infra.clock import SystemClock
from infra.errors import WaitTimeout
from infra.wire import Publisher, unpack
from schemas.identity import group_id, payload_digest
from schemas.message import Message
from schemas.messages import Episode, Task
from schemas.topics import HOUR_MS, TASKS, Topic

M = TypeVar("M", bound=Message)

POLL_S = 0.1
"""One poll lasts at most this long, seconds."""

POLL_RECORDS = 1000
"""Most records of one poll."""


def make_tasks(run: str, payloads: Sequence[dict[str, Any]], *, family: str) -> list[Task]:
    """Return one task per payload: a group of one sample each."""
    start_by_ms = SystemClock().now_ms() + HOUR_MS
    return [
        Task(
            run=run,
            group=group_id(run, "benchmarks", 0, row, payload),
            sample=0,
            samples=1,
            source="benchmarks",
            row=row,
            payload=payload,
            payload_digest=payload_digest(payload),
            family=family,
            seed=row,
            start_by_ms=start_by_ms,
        )
        for row, payload in enumerate(payloads)
    ]


def episodes(tasks: Sequence[Task]) -> list[Episode]:
    """Return what INIT makes of tasks, to give it to RUN without an INIT."""
    go = ({"role": "user", "content": "go"},)
    return [Episode(task=task, host="simulated", lease=subject(task), messages=go) for task in tasks]


def subject(task: Task) -> str:
    """Return what names the sample of a task in the headers of all records about it."""
    return f"{task.run}/{task.group}/{task.sample}"


def subject_of(record: Record) -> str:
    """Return the subject in the headers of a record; empty if there is none."""
    return dict(record.headers).get("ce_subject", b"").decode()


async def publish(bus: Bus, tasks: Sequence[Task]) -> None:
    """Append the tasks; returns when all are durable."""
    await publish_to(bus, TASKS, tasks)


async def publish_to(bus: Bus, topic: Topic[M], messages: Sequence[M]) -> None:
    """Append messages to a topic; returns when all are durable."""
    publisher = Publisher(bus, SystemClock(), "benchmarks")
    await asyncio.gather(*(publisher.publish(topic, message) for message in messages))


async def ends(bus: Bus, topic: Topic[Any]) -> dict[TopicPartition, int]:
    """Return where each partition of a topic ends now: the place to read a round from."""
    return {TopicPartition(topic.name, part): end for part, end in (await bus.end_offsets(topic.name)).items()}


async def collect(
    bus: Bus, topic: Topic[M], start: Mapping[TopicPartition, int], tasks: Sequence[Task], *, limit_s: float
) -> dict[str, Record]:
    """Return the first record of each task's sample on a topic, as soon as all are there, by subject.

    Raises:
        WaitTimeout: some were not there in time.
    """
    wanted = {subject(task) for task in tasks}
    found: dict[str, Record] = {}
    try:
        async with asyncio.timeout(limit_s), aclosing(follow(bus, start)) as records:
            async for record in records:
                name = subject_of(record)
                if name in wanted:
                    found.setdefault(name, record)
                if len(found) == len(wanted):
                    return found
    except TimeoutError as error:
        raise WaitTimeout(f"{len(found)} of {len(wanted)} samples were on {topic.name} after {limit_s:g} s") from error
    raise AssertionError("the records of a log do not end")


async def messages(topic: Topic[M], records: Mapping[str, Record]) -> dict[str, M]:
    """Return the messages of collected records, by subject."""
    return {subject: (await unpack(topic, record)).message for subject, record in records.items()}


async def follow(bus: Bus, start: Mapping[TopicPartition, int]) -> AsyncGenerator[Record, None]:
    """Yield the records of some partitions from these offsets on, without an end."""
    reader = await bus.read(start)
    try:
        while True:
            for record in await reader.poll(POLL_RECORDS, POLL_S):
                yield record
    finally:
        await reader.close()
