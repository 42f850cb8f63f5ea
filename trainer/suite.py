"""A suite that was played, read back from the log: how each sample of each task ended.

A suite is known by its run's name, or by the version that it was played with: `RUN@best`, `RUN@last`, `RUN@step:N`.
What counts is what counted when it was played: one version's samples, of the first try or the second. The same task
of another suite has the same payload, environment seed and place; groups have other names, since these hold the
run's. Nothing is written, and nothing here knows how a suite is played.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from infra.bus import Bus
from infra.clock import Clock
from infra.control import control_now
from infra.errors import ConfigError
from infra.trajectories import TrajectoryReader
from schemas.control import RunManifest
from schemas.decisions import Evaluated
from schemas.identity import run_name
from schemas.messages import Trajectory
from schemas.outcome import Completed
from trainer.aliases import evaluated
from trainer.decision_log import read_history, read_started

SETTINGS = ("seed", "samples", "horizon", "max_sampled_tokens", "sampling")
"""What a manifest says of how samples come about."""


class TaskKey(NamedTuple):
    """A task, whoever plays it."""

    payload_digest: str
    """Digest of its payload."""
    seed: int
    """Seed of its environment."""
    row: int
    """Its place in the suite, which may hold it twice."""


class Name(NamedTuple):
    """What a person calls a suite that was played."""

    run: str
    """The run that was evaluated, or else the one under which the suite was played."""
    version: str
    """Which of its versions; empty for the latter."""

    def __str__(self) -> str:
        return f"{self.run}@{self.version}" if self.version else self.run


@dataclass(frozen=True, kw_only=True)
class Suite:
    """How a suite ended."""

    name: Name
    """What it was asked for as."""
    run: str
    """The run under which it was played."""
    version: int | None
    """The only version whose samples count; none where any does."""
    settings: Mapping[str, Any]
    """How its samples came about."""
    tasks: Mapping[TaskKey, tuple[float | None, ...]]
    """Task -> success of each sample; none if it is missing."""
    silent: int
    """Tasks that were asked for, and of which nothing is in the log."""


def parse_name(text: str) -> Name:
    """Return what a text names. Raises ValueError."""
    run, at, version = text.rpartition("@")
    if at and not version:
        raise ValueError(f"{text!r}: name the version as RUN@best, RUN@last or RUN@step:N")
    return Name(run_name(run), version) if at else Name(run_name(text), "")


def counts(trajectory: Trajectory | None, version: int | None) -> bool:
    """Tell whether a sample has a grade, and no other version than this one had a part in it."""
    if trajectory is None or not isinstance(trajectory.outcome, Completed):
        return False
    spans = trajectory.transcript.spans if trajectory.transcript else ()
    return version is None or all(span.version == version and not span.weights_of for span in spans)


async def read_suite(bus: Bus, clock: Clock, name: Name) -> Suite:
    """Read how a suite ended.

    Raises:
        ConfigError: there is none of that name.
        infra.errors.OffsetLost: retention has removed its first outcomes.
    """
    found = await _by_version(bus, clock, name) if name.version else None
    run = found.scores.run if found else name.run
    manifest = (await control_now(bus, clock)).get(f"run/{run}", RunManifest)
    if manifest is None:
        raise ConfigError(
            f"run {run!r} has no manifest: nothing was published under it, or the topic prefix is another one. "
            f"`rollmill runs` lists the runs"
        )
    if found is None:
        found = await _by_run(bus, clock, manifest)
    version = found.version if found else None
    tasks = await _read(bus, clock, manifest, version)
    return Suite(
        name=name,
        run=run,
        version=version,
        settings={key: msgspec.to_builtins(getattr(manifest, key)) for key in SETTINGS},
        tasks=tasks,
        silent=max(0, found.scores.tasks - len(tasks)) if found else 0,
    )


async def _by_version(bus: Bus, clock: Clock, name: Name) -> Evaluated:
    history, _ = await read_started(bus, clock, name.run)
    try:
        return evaluated(history, name.version)
    except ConfigError as error:
        raise ConfigError(f"run {name.run!r}: {error}") from error


async def _by_run(bus: Bus, clock: Clock, manifest: RunManifest) -> Evaluated | None:
    """Return what was written down about a suite that a trainer had played; none if nobody did."""
    history = await read_history(bus, clock, manifest.run)
    if history.start is not None:
        raise ConfigError(
            f"run {manifest.run!r} is trained, so its samples are of many versions: name the one that is meant, as "
            f"{manifest.run}@best, {manifest.run}@last or {manifest.run}@step:N"
        )
    of = manifest.extra.get("evaluates")
    trained = of.get("run") if isinstance(of, dict) else None
    if not isinstance(trained, str):
        return None
    history = await read_history(bus, clock, trained)
    known = [*history.evaluations.values(), *([history.gate] if history.gate else [])]
    return next((one for one in known if one.scores.run == manifest.run), None)


async def _read(
    bus: Bus, clock: Clock, manifest: RunManifest, version: int | None
) -> dict[TaskKey, tuple[float | None, ...]]:
    successes: dict[TaskKey, dict[int, float]] = {}
    sizes: dict[TaskKey, int] = {}
    async with TrajectoryReader.on(bus, clock, manifest.run, start=manifest.trajectories_start) as reader:
        async for trajectory in reader.accepted(follow=False):
            task = trajectory.task
            key = TaskKey(task.payload_digest, task.seed, task.row)
            sizes[key] = max(sizes.get(key, 0), task.samples)
            ends = successes.setdefault(key, {})
            if counts(trajectory, version) and isinstance(trajectory.outcome, Completed):
                ends.setdefault(task.sample, trajectory.outcome.success)
    return {key: tuple(ends.get(sample) for sample in range(sizes[key])) for key, ends in successes.items()}
