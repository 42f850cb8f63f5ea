"""Waits for the outcomes of a run that nobody trains on: an evaluation, or a batch of tasks just published.

Reads the run through `infra/trajectories.py`, so each sample is counted once. It knows no trainer and commits nothing:
reading again gives the same outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from infra.bus import Bus
from infra.clock import Clock
from infra.errors import WaitTimeout
from infra.trajectories import TrajectoryReader
from schemas.control import RunManifest
from schemas.messages import SampleId, Trajectory


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
    found: list[Trajectory] = []
    until = clock.monotonic() + limit_s
    async with TrajectoryReader.on(bus, clock, manifest.run, start=manifest.trajectories_start) as reader:
        while len(found) < samples:
            if clock.monotonic() > until:
                raise WaitTimeout(
                    f"waited {limit_s:g} s for {samples} outcomes of run {manifest.run!r}, {len(found)} came; "
                    f"`rollmill status` shows which stage is behind"
                )
            found += await reader.poll()
            on_progress(len(found))
    return found


async def endings(
    reader: TrajectoryReader,
    clock: Clock,
    wanted: Collection[SampleId],
    known: dict[SampleId, Trajectory],
    *,
    until_ms: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> set[SampleId]:
    """Take the accepted trajectories of a run into `known` until all of some samples are there, or it is too late.

    Args:
        reader: of the run.
        clock: for the limit.
        wanted: the samples to wait for.
        known: what has ended, of whatever sample.
        until_ms: the limit, milliseconds since the epoch.
        on_progress: told how many of the wanted ones have ended.

    Returns:
        The samples of which nothing came.
    """
    waiting = {sample for sample in wanted if sample not in known}
    while waiting:
        late = clock.now_ms() >= until_ms
        found = await reader.poll()
        for trajectory in found:
            known[trajectory.task.id] = trajectory
            waiting.discard(trajectory.task.id)
        on_progress(len(wanted) - len(waiting))
        if late and not found:  # what lies in the log already is taken, however late it is
            break
    return waiting
