"""Reading what lies in the log already: partitions from one offset to another, once, in no group.

For whoever asks a question of the log and goes on without it (replay, a trainer that takes over, `rollmill status`).
Promises: every record in [start, end) that is still there is yielded, in offset order per partition, and none at or
beyond the end; the reader is closed however the loop is left; a log that falls silent before its end is a WaitTimeout.
Messages are not known here: what cannot be decoded is the caller's to judge.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from infra.bus import Bus, Record, TopicPartition
from infra.clock import Clock
from infra.errors import WaitTimeout
from schemas.partition import partition_for
from schemas.topics import Topic

SILENCE_S = 60.0
"""Longest wait for the next record that is known to be in the log, seconds."""

POLL_S = 0.5
"""One poll lasts at most this long, seconds."""

BATCH = 1_000
"""Most records of one poll."""


def positions(topic: Topic[Any], offsets: Mapping[int, int]) -> dict[TopicPartition, int]:
    """Return offsets by partition number, as `Bus.begin_offsets` and `end_offsets` give them, by partition."""
    return {TopicPartition(topic.name, number): offset for number, offset in offsets.items()}


def partition_of(topic: Topic[Any], run: str) -> TopicPartition:
    """Return where a topic that is spread by run holds the records of one."""
    return TopicPartition(topic.name, partition_for(run, topic.partitions))


async def read_between(
    bus: Bus, clock: Clock, start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]
) -> AsyncGenerator[Record, None]:
    """Yield the records of some partitions.

    Args:
        bus: the log.
        clock: for the limit.
        start: first offset of each partition.
        end: offset behind the last one of each; it may lie before the log's own end.

    Raises:
        WaitTimeout: nothing came for SILENCE_S although the end is not reached.
        infra.errors.OffsetLost: retention has removed the start.
    """
    reader = await bus.read(start)
    try:
        heard_at = clock.monotonic()
        while behind := [tp for tp, last in end.items() if reader.position(tp) < last]:
            found = await reader.poll(BATCH, POLL_S)
            for record in found:
                if record.offset < end[record.tp]:
                    yield record
            if found:
                heard_at = clock.monotonic()
            elif clock.monotonic() - heard_at > SILENCE_S:
                tp = behind[0]
                raise WaitTimeout(
                    f"waited {SILENCE_S:g} s for offset {end[tp]} of {tp.topic}, partition {tp.partition}; read up to "
                    f"{reader.position(tp)}. Is the broker healthy?"
                )
    finally:
        await reader.close()
