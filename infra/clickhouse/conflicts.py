"""Conflicts: terminal records that speak of another task under an id that was taken; each becomes a letter in `dead`.

The digest of a group's first terminal record in its partition is the group's, and a later one with another digest ends
no sample (`schemas/arbiter.py`): every reader passes over it, and here a person is told. What came first is asked of
ClickHouse once the range is stored. The sink stores a partition in order, so everything before the end of the range is
there, and the answer is the same whoever asks, and however often.

Promises: a letter for every conflict whose record is still in the log, written before its range counts as done. A range
that is done again after a crash adds none: before the first letter of a partition is written, those that lie in `dead`
already are read. Only two members that work on one range at the same moment, one of which has just lost the partition,
may both write a letter. Judging changes no row, and the view `conflicts` shows the same records.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from clickhouse_connect.driver.asyncclient import AsyncClient

from infra.bus import Bus, TopicPartition
from infra.clickhouse.client import FAILURES, explained
from infra.clickhouse.ranges import Range
from infra.clickhouse.rows import TRAJECTORIES as TABLE
from infra.clock import Clock
from infra.dead_letter import CONFLICT, SKEW_MS, Death, bury, in_dead
from infra.reading import read_between
from schemas.topics import TRAJECTORIES

log = logging.getLogger(__name__)

ASK_GROUPS = 500
"""Most groups that one question names: they travel in its URL."""

MAX_NAME = 200
"""Longest name of a run or group that is asked for, characters: ours have 20. Longer ones are in the view alone."""

_RUN, _GROUP, _DIGEST, _OFFSET = (
    list(TABLE.columns).index(name) for name in ("run", "group", "payload_digest", "kafka_offset")
)

_TAKEN = """
SELECT run, `group`, argMin(payload_digest, kafka_offset), min(kafka_offset) FROM trajectories
WHERE kafka_partition = {partition:UInt32} AND run IN {runs:Array(String)} AND `group` IN {groups:Array(String)}
GROUP BY run, `group` HAVING uniqExact(payload_digest) > 1
"""


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """One record that speaks of another task."""

    offset: int
    """Where it lies in its partition of `trajectories`."""
    run: str
    """The run that it names."""
    group: str
    """The group that it names."""
    digest: str
    """Payload digest of its task."""
    taken_by: str
    """Payload digest of the task that has the id."""
    taken_at: int
    """Where the first record of that one lies, in the same partition."""

    def __str__(self) -> str:
        return (
            f"the id {self.run}/{self.group} was taken by the task with payload digest {self.taken_by} (its first "
            f"terminal record is at offset {self.taken_at}); this record is of one with payload digest {self.digest}, "
            "so it ends no sample. Publish that task again under an id of its own"
        )


async def conflicts_in(client: AsyncClient, due: Range) -> list[Conflict]:
    """Return the conflicts among the records of a range that is stored.

    Raises:
        infra.clickhouse.client.StoreError: ClickHouse is away or refuses.
    """
    rows = due.rows.get(TABLE.name, [])
    taken: dict[tuple[str, str], tuple[str, int]] = {}
    try:
        for runs, groups in _questions({(row[_RUN], row[_GROUP]) for row in rows}):
            named = {"partition": due.tp.partition, "runs": runs, "groups": groups}
            for run, group, digest, offset in (await client.query(_TAKEN, named)).result_rows:
                taken[run, group] = (digest, offset)
    except FAILURES as error:
        raise explained(error, f"looking for conflicts in {due.tp} {due.first}-{due.last}") from error
    return [
        Conflict(
            offset=row[_OFFSET],
            run=row[_RUN],
            group=row[_GROUP],
            digest=row[_DIGEST],
            taken_by=first[0],
            taken_at=first[1],
        )
        for row in rows
        if (first := taken.get((row[_RUN], row[_GROUP]))) is not None and first[0] != row[_DIGEST]
    ]


def _questions(names: Collection[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield runs and groups to ask for together."""
    short = sorted((run, group) for run, group in names if max(len(run), len(group)) <= MAX_NAME)
    for start in range(0, len(short), ASK_GROUPS):
        part = short[start : start + ASK_GROUPS]
        yield sorted({run for run, _ in part}), sorted({group for _, group in part})


class ConflictLetters:
    """Writes the letters of one sink's partitions."""

    def __init__(self, bus: Bus, clock: Clock, stage: str) -> None:
        """Begin without any.

        Args:
            bus: the log.
            clock: time.
            stage: who gives the records up, as the letters say.
        """
        self._bus = bus
        self._clock = clock
        self._stage = stage
        self._written: dict[TopicPartition, set[int]] = {}
        """Partition of `trajectories` -> offsets of records that have their letter; absent until one is needed."""

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """Let go of partitions that another member may own now: what it writes is read should they come back."""
        for tp in partitions:
            self._written.pop(tp, None)

    async def write(self, client: AsyncClient, due: Range) -> int:
        """Write the letters that a stored range still needs, and return their number.

        Raises:
            infra.clickhouse.client.StoreError: ClickHouse is away or refuses; nothing was written.
            infra.errors.BusError: the log is away.
        """
        return await self.bury(due.tp, await conflicts_in(client, due)) if due.tp.topic == TRAJECTORIES.name else 0

    async def bury(self, tp: TopicPartition, found: Sequence[Conflict]) -> int:
        """Write the letters of these conflicts of one partition, in offset order, and return their number."""
        if not found:
            return 0
        begin = (await self._bus.begin_offsets(tp.topic))[tp.partition]
        there = {conflict.offset: conflict for conflict in found if conflict.offset >= begin}
        if len(there) < len(found):
            log.warning("%s: %d conflicts get no letter, their records have left the log", tp, len(found) - len(there))
        if not there:
            return 0
        return await self._bury(tp, there)

    async def _bury(self, tp: TopicPartition, found: dict[int, Conflict]) -> int:
        buried, first, end = 0, min(found), max(found) + 1
        async for record in read_between(self._bus, self._clock, {tp: first}, {tp: end}):
            conflict = found.get(record.offset)
            if conflict is None:
                continue
            if tp not in self._written:
                since_ms = record.timestamp_ms - SKEW_MS
                self._written[tp] = await in_dead(self._bus, self._clock, tp, since_ms, CONFLICT)
            written = self._written[tp]
            written.difference_update([offset for offset in written if offset < first])  # they do not come again
            if record.offset in written:
                continue
            log.warning("record %s:%d to dead: %s", tp, record.offset, conflict)
            death = Death(stage=self._stage, kind=CONFLICT, cause=str(conflict))
            await bury(self._bus, self._clock, record, death)
            written.add(record.offset)
            buried += 1
        return buried
