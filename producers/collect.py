"""Waits for the outcomes of a run that nobody trains on: an evaluation, or a batch of tasks just published.

Reads the run's partition of `trajectories` through the arbiter, so each sample is counted once. It knows no trainer
and commits nothing: reading again gives the same outcomes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from infra.bus import Bus, Reader, Record, TopicPartition
from infra.clock import Clock
from infra.errors import BusError, OffsetLost, WaitTimeout
from infra.wire import unpack
from schemas.arbiter import Arbiter, Ruling
from schemas.codec import DecodeError
from schemas.control import RunManifest
from schemas.messages import Trajectory
from schemas.partition import partition_for
from schemas.topics import TRAJECTORIES

POLL_S: Final = 0.5
"""One poll lasts at most this long, seconds."""

BATCH: Final = 500
"""Most records of one poll."""

AWAY_S: Final = 1.0
"""Pause before a log that is away is read again, seconds."""

log = logging.getLogger(__name__)


async def outcomes(
    bus: Bus,
    clock: Clock,
    manifest: RunManifest,
    samples: int,
    *,
    limit_s: float,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[Trajectory]:
    """Return the accepted trajectories of a run, in log order, once there are `samples` of them.

    Raises:
        WaitTimeout: they did not come within limit_s; says how many did.
    """
    tp = TopicPartition(TRAJECTORIES.name, partition_for(manifest.run, TRAJECTORIES.partitions))
    reader = await bus.read({tp: manifest.trajectories_start})
    arbiter, found = Arbiter(), list[Trajectory]()
    until = clock.monotonic() + limit_s
    try:
        while len(found) < samples:
            if clock.monotonic() > until:
                raise WaitTimeout(
                    f"waited {limit_s:g} s for {samples} outcomes of run {manifest.run!r}, {len(found)} came; "
                    f"`rollmill status` shows which stage is behind"
                )
            for record in await _poll(reader, clock):
                trajectory = await _accepted(bus, record, manifest.run, arbiter)
                if trajectory is not None:
                    found.append(trajectory)
            on_progress(len(found))
    finally:
        await reader.close()
    return found


async def _poll(reader: Reader, clock: Clock) -> list[Record]:
    """Read on, or nothing while the log is away: the caller's limit covers a broker's restart."""
    try:
        return await reader.poll(BATCH, POLL_S)
    except OffsetLost:
        raise  # waiting brings nothing back
    except BusError as error:
        log.info("the log is away, outcomes are waited for: %s", error)
        await clock.sleep(AWAY_S)
        return []


async def _accepted(bus: Bus, record: Record, run: str, arbiter: Arbiter) -> Trajectory | None:
    try:
        trajectory = (await unpack(TRAJECTORIES, record, bus)).message
    except DecodeError:
        return None  # not a terminal record of anything; its writer is to blame, and the sink says so
    task = trajectory.task
    if task.run != run:
        return None
    ruling = arbiter.rule(task.group, task.sample, task.payload_digest, record.offset)
    return trajectory if ruling is Ruling.ACCEPTED else None
