"""Consumer lag of the stages: how many records of its topics each group has not done yet.

Records behind the committed offset are done, and so are those that its map calls done; what is in flight counts. That
is the number to scale by: Kafka's own lag counts what is done behind one slow record too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infra.bus import Bus, Committed
from infra.offset_map import OffsetMap, decode
from schemas.message import Message
from schemas.topics import TABLE, Topic

STAGE_TOPICS: Mapping[str, Sequence[Topic[Message]]] = {
    stage: tuple(topic for topic in TABLE if stage in topic.consumers and not topic.compacted)
    for stage in ("init", "run", "eval")
}
"""Consumer group -> topics it reads, as the table says; state (`control`) is followed, and is no work."""


@dataclass(frozen=True)
class StageLag:
    """How far one stage is behind."""

    stage: str
    """Name of the stage and its group."""
    lag: int = 0
    """Records that are not done."""
    topics: dict[str, int] = field(default_factory=dict)
    """The same by topic."""


async def stage_lags(bus: Bus) -> list[StageLag]:
    """Return the lag of every stage."""
    return list(await asyncio.gather(*(_stage_lag(bus, stage, topics) for stage, topics in STAGE_TOPICS.items())))


async def _stage_lag(bus: Bus, stage: str, topics: Sequence[Topic[Message]]) -> StageLag:
    behind = {topic.name: await _topic_lag(bus, stage, topic.name) for topic in topics}
    return StageLag(stage, sum(behind.values()), behind)


async def _topic_lag(bus: Bus, group: str, topic: str) -> int:
    begin, end, committed = await asyncio.gather(
        bus.begin_offsets(topic), bus.end_offsets(topic), bus.committed(group, topic)
    )
    return sum(_open(first, end[part], committed.get(part) or Committed(first)) for part, first in begin.items())


def _open(begin: int, end: int, committed: Committed) -> int:
    """Return the records of a partition that are not done.

    Retention may have passed the committed offset, and the group may have passed the end that was asked for.
    """
    known = decode(committed) or OffsetMap(committed.offset, {})
    unfinished = sum(begin <= offset < end for offset in known.unfinished)
    return max(0, end - max(begin, known.upper)) + unfinished
