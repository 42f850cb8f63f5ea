"""Reads `dead`: one letter by its id, the newest ones of some sort, or all of some sort in turn.

Nothing is kept but what is asked for: a flood of poison may have made the topic large. The newest are found by reading
backwards, a window at a time, and only as far as a partition may still hold a newer one, as its timestamps go.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from infra.bus import Bus, TopicPartition
from infra.clock import Clock
from infra.dead_letter import DeadLetter
from infra.errors import ConfigError
from infra.reading import positions, read_between
from schemas.topics import DEAD

WINDOW = 200
"""Records of each partition that are read at once on the way back."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which letters are asked for; what is empty asks for all."""

    run: str = ""
    """About a sample of this run."""
    kind: str = ""
    """Given up for this: a failure's kind, or `poison`, `too_large`, `crashed`, `not_stored`, `conflict`."""
    since_ms: int = 0
    """Buried at this time or later, milliseconds since the epoch."""

    async def has(self, letter: DeadLetter) -> bool:
        """Tell whether a letter is one of them."""
        if letter.record.timestamp_ms < self.since_ms or self.kind not in {"", letter.death.kind}:
            return False
        return not self.run or (await letter.sample()).startswith(f"{self.run}/")


@dataclass(frozen=True, kw_only=True)
class Line:
    """What a list tells of a letter; without its value, which may have a megabyte."""

    id: str
    """`partition:offset` in `dead`."""
    at_ms: int
    """When it was buried, milliseconds since the epoch."""
    kind: str
    """What it died of."""
    stage: str
    """Who gave it up."""
    topic: str
    """Where it lay before."""
    sample: str
    """`run/group/sample`, if anything says so."""
    attempts: int | None
    """Attempts made, if any was."""
    cause: str
    """The error, for a person."""

    @classmethod
    async def of(cls, letter: DeadLetter) -> Line:
        """Return the line of a letter."""
        death = letter.death
        return cls(
            id=letter.id,
            at_ms=letter.record.timestamp_ms,
            kind=death.kind,
            stage=death.stage,
            topic=letter.original.topic,
            sample=await letter.sample(),
            attempts=death.attempts,
            cause=death.cause,
        )


async def letters(bus: Bus, clock: Clock, wanted: Wanted) -> AsyncIterator[DeadLetter]:
    """Yield letters up to the present end of the log; of each partition the oldest first."""
    begin, end = await _ends(bus)
    async for record in read_between(bus, clock, begin, end):
        letter = DeadLetter(record, bus)
        if await wanted.has(letter):
            yield letter


async def letter_at(bus: Bus, clock: Clock, name: str) -> DeadLetter:
    """Return a letter by its id.

    Raises:
        ConfigError: it is no id, or none of a letter that is in the log.
    """
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,18})", name)
    if match is None:
        raise ConfigError(f"{name!r} is no dead letter; expected PARTITION:OFFSET, as `rollmill dead list` shows it")
    tp, offset = TopicPartition(DEAD.name, int(match[1])), int(match[2])
    begin, end = await _ends(bus)
    if tp not in end:
        raise ConfigError(f"no dead letter {name}: `dead` has partitions 0 to {len(end) - 1}")
    if not begin[tp] <= offset < end[tp]:
        raise ConfigError(
            f"no dead letter {name}: partition {tp.partition} of `dead` holds offsets {begin[tp]} to {end[tp]}, "
            "without the last"
        )
    async for record in read_between(bus, clock, {tp: offset}, {tp: offset + 1}):
        return DeadLetter(record, bus)
    raise ConfigError(f"no dead letter {name}: nothing lies at that offset")


async def newest(bus: Bus, clock: Clock, wanted: Wanted, limit: int) -> list[Line]:
    """Return the letters that were buried last, the last one first, at most `limit`."""
    begin, floor = await _ends(bus)
    found: list[Line] = []
    behind = {tp for tp, offset in floor.items() if offset > begin[tp]}
    while behind:
        end = {tp: floor[tp] for tp in behind}
        start = {tp: max(begin[tp], offset - WINDOW) for tp, offset in end.items()}
        oldest: dict[TopicPartition, int] = {}
        async for record in read_between(bus, clock, start, end):
            oldest.setdefault(record.tp, record.timestamp_ms)
            if await wanted.has(letter := DeadLetter(record, bus)):
                found.append(await Line.of(letter))
        found = sorted(found, key=lambda line: line.at_ms, reverse=True)[:limit]
        floor |= start
        # Nothing before a window is newer than the window's first record.
        enough_ms = max(wanted.since_ms, found[-1].at_ms if len(found) == limit else 0)
        behind = {tp for tp in behind if floor[tp] > begin[tp] and oldest.get(tp, enough_ms) >= enough_ms}
    return found


async def _ends(bus: Bus) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    begin = positions(DEAD, await bus.begin_offsets(DEAD.name))
    return begin, positions(DEAD, await bus.end_offsets(DEAD.name))
