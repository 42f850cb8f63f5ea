"""Proves where every sample of a run went, by SQL, at one moment.

The moment is a cut: the end offsets of `decisions`, `trajectories` and `tasks`, read in that order, so that whatever a
decision names lies before the cut too. The check waits until the sink has stored everything before the cut, then asks
the view `placed` (schema.sql), which follows schemas/dispositions.py:

(a) the dispositions of the admitted samples sum to the admitted ones, and no sample is open past its time;
(b) every decision names the offset of the accepted record;
(c) every bucket but open and unread comes from a row of its own;
(d) no sample is in two live decisions.

A run that was made by grading another one anew has no tasks: each of its outcomes brings its sample along, and (a) asks
for one of every outcome that the other run had when it was graded, as the manifest says, and for none besides.

This file writes no row, and knows neither the trainer nor the stages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clickhouse_connect.driver.asyncclient import AsyncClient

from infra.bus import Bus
from infra.clickhouse import schema
from infra.clickhouse.client import FAILURES, Address, connect, explained
from infra.clock import Clock
from infra.control import control_now
from infra.errors import WaitTimeout
from schemas import topics
from schemas.control import RunManifest
from schemas.dispositions import REPLAYED, Disposition

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""How long the check waits for the sink to pass the cut, in seconds."""

POLL_S = 0.2
"""Pause between two looks at the sink's positions, in seconds."""

OPEN_GRACE_S = 90.0
"""An open sample is a violation this long after its time: the reaper allows a grace of its own, then needs a moment."""

SHOWN = 100
"""Most violations listed by name; all are counted."""

Cut = Mapping[str, tuple[int, ...]]
"""Topic -> end offset of each partition, in order."""

CONSERVATION = "SELECT * FROM conservation(run = {run:String})"
"""The proof as one query over what is stored now, for `rollmill sql` and dashboards; needs no log and no waiting."""

_CUT_TOPICS = (topics.DECISIONS, topics.TRAJECTORIES, topics.TASKS)

_PLACED = (
    "placed(run = {run:String}, tasks_end = {tasks_end:Array(UInt64)},"
    " trajectories_end = {trajectories_end:Array(UInt64)}, decisions_end = {decisions_end:Array(UInt64)},"
    " now_ms = {now_ms:Int64})"
)

_COUNTS = f"SELECT bucket, count() FROM {_PLACED} WHERE is_admitted GROUP BY bucket"  # noqa: S608 - our own text

_VIOLATIONS = f"""
SELECT `group`, sample, violation, count() OVER () AS found
FROM {_PLACED} ARRAY JOIN violations AS violation
ORDER BY violation, `group`, sample LIMIT {SHOWN}
"""  # noqa: S608 - our own text

_ORIGIN = f"""
SELECT `group`, sample, here, count() OVER () AS found FROM (
    SELECT any(`group`) AS `group`, sample, max(here) AS here, max(there) AS there FROM (
        SELECT `group`, sample, source, visit, row, payload_digest, 1 AS here, 0 AS there
        FROM trajectories
        WHERE run = {{run:String}} AND stage = '{REPLAYED}'
            AND kafka_offset < {{trajectories_end:Array(UInt64)}}[kafka_partition + 1]
        UNION ALL
        SELECT `group`, sample, source, visit, row, payload_digest, 0, 1
        FROM accepted
        WHERE run = {{origin:String}}
            AND kafka_offset >= {{origin_start:UInt64}} AND kafka_offset < {{origin_end:UInt64}}
    )
    GROUP BY source, visit, row, payload_digest, sample
)
WHERE here != there ORDER BY `group`, sample LIMIT {SHOWN}
"""  # noqa: S608 - our own text
"""Outcomes of one of both runs without its counterpart: their places are the same, their groups are not."""

_DOUBLED = f"""
SELECT kafka_topic, kafka_partition, kafka_offset, count() AS copies FROM (
    SELECT kafka_topic, kafka_partition, kafka_offset FROM tasks WHERE run = {{run:String}}
    UNION ALL
    SELECT kafka_topic, kafka_partition, kafka_offset FROM trajectories WHERE run = {{run:String}}
    UNION ALL
    SELECT kafka_topic, kafka_partition, kafka_offset FROM decisions WHERE run = {{run:String}}
)
GROUP BY ALL HAVING copies > 1 ORDER BY ALL LIMIT {SHOWN}
"""  # noqa: S608 - our own text


@dataclass(frozen=True)
class Report:
    """What the check found for one run."""

    run: str
    admitted: int
    """Samples that were asked for."""
    counts: dict[str, int]
    """Samples per disposition; those without any are left out."""
    violations: tuple[str, ...]
    """What contradicts the rules, at most SHOWN of them."""
    found: int
    """All violations."""
    cut: dict[str, tuple[int, ...]]
    """The moment: end offsets by topic."""

    @property
    def conserved(self) -> bool:
        """Tell whether the run exists and everything adds up."""
        return self.admitted > 0 and not self.violations

    def __str__(self) -> str:
        parts = " + ".join(f"{count} {name}" for name, count in self.counts.items()) or "nothing"
        verdict = "conserved" if self.conserved else f"NOT conserved, {self.found} violations"
        return f"{self.run}: {self.admitted} admitted = {parts}: {verdict}"


async def check(bus: Bus, address: Address, clock: Clock, run: str, *, wait_s: float = WAIT_S) -> Report:
    """Check one run at the present moment.

    Raises:
        WaitTimeout: the sink did not store everything up to the cut within *wait_s*.
        ConfigError: ClickHouse holds a newer schema.
        infra.clickhouse.client.StoreError: ClickHouse is away or refuses.
    """
    cut = await take_cut(bus)
    # Where no sink ever ran there are no tables; with them, what is missing can be named.
    await schema.apply(address)
    client = await connect(address)
    try:
        await _wait_for_sink(client, clock, cut, wait_s)
        return await check_at(client, run, cut, now_ms=clock.now_ms(), origin=await _origin(bus, clock, run))
    finally:
        await client.close()


async def take_cut(bus: Bus) -> dict[str, tuple[int, ...]]:
    """Return the end offsets now, in an order that keeps causes before the cut of their effects."""
    cut: dict[str, tuple[int, ...]] = {}
    for topic in _CUT_TOPICS:
        ends = await bus.end_offsets(topic.name)
        cut[topic.name] = tuple(ends.get(partition, 0) for partition in range(topic.partitions))
    return cut


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run was made of by grading anew."""

    run: str
    """The other run."""
    start: int
    """Its outcomes from this offset on ..."""
    end: int
    """... to before this one were graded."""


async def _origin(bus: Bus, clock: Clock, run: str) -> Origin | None:
    """Return what the manifest of a run says that it was made of; None if it was not graded anew."""
    manifest = (await control_now(bus, clock)).get(f"run/{run}", RunManifest)
    match manifest.extra if manifest is not None else {}:
        case {"replay_of": str(other), "replayed": [int(start), int(end)]} if 0 <= start <= end:
            return Origin(run=other, start=start, end=end)
        case _:
            return None


async def check_at(client: AsyncClient, run: str, cut: Cut, *, now_ms: int, origin: Origin | None = None) -> Report:
    """Check one run at a cut that is stored already."""
    parameters = {
        "run": run,
        **{f"{name}_end": list(ends) for name, ends in cut.items()},
        "now_ms": now_ms - int(OPEN_GRACE_S * 1000),
    }
    try:
        counts = {str(row[0]): int(row[1]) for row in (await client.query(_COUNTS, parameters)).result_rows}
        broken = (await client.query(_VIOLATIONS, parameters)).result_rows
        doubled = (await client.query(_DOUBLED, {"run": run})).result_rows
        unlike = await _unlike(client, parameters, origin) if origin is not None else []
    except FAILURES as error:
        raise explained(error, f"checking run {run}") from error
    admitted = sum(counts.values())
    buckets: dict[str, int] = {str(place): counts.pop(place) for place in Disposition if place in counts}
    violations = [f"{group}/{sample}: {text}" for group, sample, text, _ in broken]
    violations += [f"{topic}[{part}]:{offset} is stored {copies} times" for topic, part, offset, copies in doubled]
    violations += [text for text, _ in unlike]
    if sum(buckets.values()) != admitted:
        violations.append(f"(a) {admitted} admitted, but only {sum(buckets.values())} are in a bucket; {counts}")
    counted = (broken[0][3] if broken else 0) + (unlike[0][1] if unlike else 0)
    found = counted + len(violations) - len(broken) - len(unlike)
    return Report(run, admitted, buckets, tuple(violations[:SHOWN]), found, dict(cut))


async def _unlike(client: AsyncClient, parameters: dict[str, Any], origin: Origin) -> list[tuple[str, int]]:
    """Return in what a run differs from the outcomes that it was made of, each with the number of all."""
    named = {**parameters, "origin": origin.run, "origin_start": origin.start, "origin_end": origin.end}
    rows = (await client.query(_ORIGIN, named)).result_rows
    return [
        (
            f"(a) {group}/{sample}: brought by a replay, but run {origin.run} has no such outcome"
            if here
            else f"(a) {group}/{sample} of run {origin.run} was to be graded anew, and has no record here",
            found,
        )
        for group, sample, here, found in rows
    ]


async def conservation(client: AsyncClient, run: str) -> dict[str, int]:
    """Return the one line that must add up, over everything stored for a run."""
    try:
        result = await client.query(CONSERVATION, {"run": run})
    except FAILURES as error:
        raise explained(error, f"asking for the conservation of run {run}") from error
    return dict(zip(result.column_names, result.result_rows[0], strict=True))


async def sink_positions(client: AsyncClient) -> dict[tuple[str, int], int]:
    """Return (topic, partition) -> rows of all offsets below are stored."""
    try:
        result = await client.query("SELECT topic, partition, max(position) FROM positions GROUP BY topic, partition")
    except FAILURES as error:
        raise explained(error, "asking how far the sink is") from error
    return {(topic, partition): position for topic, partition, position in result.result_rows}


async def _wait_for_sink(client: AsyncClient, clock: Clock, cut: Cut, wait_s: float) -> None:
    until = clock.monotonic() + wait_s
    while behind := _behind(await sink_positions(client), cut):
        if clock.monotonic() >= until:
            raise WaitTimeout(
                f"waited {wait_s:g} s for the sink to store the log up to the cut; still missing {', '.join(behind)}."
                " Is the sink running, and does ClickHouse answer it?"
            )
        await clock.sleep(POLL_S)
        await asyncio.sleep(0)


def _behind(positions: Mapping[tuple[str, int], int], cut: Cut) -> list[str]:
    return [
        f"{topic}[{partition}]: {positions.get((topic, partition), 0)} of {end}"
        for topic, ends in cut.items()
        for partition, end in enumerate(ends)
        if positions.get((topic, partition), 0) < end
    ]
