"""Which groups a redrive has published already, from the log itself: no file of ours would know what others did.

The tasks of a redriven group lie in `tasks` for as long as that topic keeps them, and the terminal records of its
samples, which every published one gets, in `trajectories` for as long as letters lie in `dead`. Only headers are looked
at, no message is decoded. A group counts once all of its siblings were seen, so what a killed redrive has left half
published is completed by the next one.

`trajectories` is only asked for letters so old that the tasks of their redrive may have left the log, and only as far
back as such a redrive can lie: a group has its first letter at most the retention of `tasks` before its last one, since
no group is on its way for longer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from infra.bus import Bus, TopicPartition
from infra.clock import Clock
from infra.reading import positions, read_between
from schemas.partition import partition_for
from schemas.topics import HOUR_MS, STAGE_MS, TASKS, TRAJECTORIES

MARGIN_MS = HOUR_MS
"""Clocks of those who write to the log differ by less than this, milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Sought:
    """A group that a redrive would publish."""

    run: str
    """Its run."""
    group: str
    """The group."""
    samples: int
    """Its siblings."""
    died_ms: int
    """When the letter died that it is made of, milliseconds since the epoch."""

    @property
    def name(self) -> str:
        """What the subjects of its samples begin with."""
        return f"{self.run}/{self.group}"


async def published(bus: Bus, clock: Clock, groups: Collection[Sought]) -> frozenset[str]:
    """Return the groups, by their ids, all of whose siblings are in the log.

    Raises:
        infra.errors.BusError: the log is away.
    """
    missing = {one.name: {str(sample) for sample in range(one.samples)} for one in groups}
    begin = positions(TASKS, await bus.begin_offsets(TASKS.name))
    await _strike_out(bus, clock, begin, positions(TASKS, await bus.end_offsets(TASKS.name)), missing)
    gone_ms = clock.now_ms() - STAGE_MS + MARGIN_MS
    old = [one for one in groups if missing[one.name] and one.died_ms < gone_ms]
    if old:
        since = await bus.offsets_since(TRAJECTORIES.name, max(0, min(one.died_ms for one in old) - STAGE_MS))
        ends = await bus.end_offsets(TRAJECTORIES.name)
        parts = {partition_for(one.run, TRAJECTORIES.partitions) for one in old}
        start = {TopicPartition(TRAJECTORIES.name, part): since[part] for part in parts}
        end = {TopicPartition(TRAJECTORIES.name, part): ends[part] for part in parts}
        await _strike_out(bus, clock, start, end, {one.name: missing[one.name] for one in old})
    return frozenset(one.group for one in groups if not missing[one.name])


async def _strike_out(
    bus: Bus,
    clock: Clock,
    start: Mapping[TopicPartition, int],
    end: Mapping[TopicPartition, int],
    missing: Mapping[str, set[str]],
) -> None:
    """Remove from `missing` (group -> samples) what the records between two positions speak of."""
    left = sum(map(len, missing.values()))
    async for record in read_between(bus, clock, start, end):
        group, _, sample = (record.header("ce_subject") or b"").decode(errors="replace").rpartition("/")
        if sample in missing.get(group, ()):
            missing[group].discard(sample)
            left -= 1
            if not left:
                return
