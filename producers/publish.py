"""Groups -> tasks: expands an instance into n messages and publishes them.

Ids and seeds are derived from the run, the source and the place, so publishing the same source twice under one run
changes nothing: the second outcome of a sample is superseded. Whoever publishes to a run first writes its manifest;
a second publisher with another manifest is refused, since siblings of one run must be alike. Two that write it at the
same moment read it back: the first one in the log counts for both.

What a stage would refuse is refused here, by the stages' own rules (`schemas/task_flaws.py`): before a manifest is
written, which stands for good, and before any task of a group is published.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from infra.bus import Bus
from infra.clock import Clock
from infra.control import control_now
from infra.errors import ConfigError
from infra.wire import Publisher
from producers.publish_all import publish_all
from producers.source import Instance, TaskSource
from schemas.control import Cancel, Credit, RunManifest
from schemas.identity import group_id, payload_digest, run_name, task_seed
from schemas.messages import Task
from schemas.partition import partition_for
from schemas.task_flaws import manifest_refusal, refusal
from schemas.topics import CONTROL, TASKS, TRAJECTORIES

SHARED = ("seed", "samples", "budgets", "horizon", "max_sampled_tokens", "sampling", "paced")
"""Fields of a manifest that all samples of a run share."""

STAMPED = ("horizon", "sampling.temperature")
"""Of these, what the trainer of a paced run stamps on each group at admission: it may change from group to group."""


def tasks_of(
    manifest: RunManifest,
    source: str,
    instance: Instance,
    *,
    now_ms: int,
    admission: int | None = None,
    credit: Credit | None = None,
) -> list[Task]:
    """Return the siblings of one group.

    Args:
        manifest: the run.
        source: name of the source.
        instance: what to roll out.
        now_ms: time of publication.
        admission: the feeder's dense number of the group.
        credit: what the trainer stamps on groups admitted now.

    Raises:
        ConfigError: no stage would run them.
    """
    sampling = manifest.sampling
    if credit is not None:
        sampling = msgspec.structs.replace(sampling, temperature=credit.temperature)
    horizon = manifest.horizon if credit is None else credit.horizon
    place = f"instance at visit {instance.visit}, row {instance.row} of {source!r}"
    try:
        group = group_id(manifest.run, source, instance.visit, instance.row, instance.payload)
        seed, digest = task_seed(manifest.seed, source, instance.visit, instance.row), payload_digest(instance.payload)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{place} has no form on the wire, nothing of it is published: {error}") from error
    first = Task(
        run=manifest.run,
        group=group,
        sample=0,
        samples=manifest.samples,
        source=source,
        visit=instance.visit,
        row=instance.row,
        payload=instance.payload,
        payload_digest=digest,
        family=instance.family,
        seed=seed,
        admission=admission,
        start_by_ms=now_ms + int(manifest.start_within_s * 1000),
        budgets=manifest.budgets,
        horizon=horizon if instance.horizon is None else instance.horizon,
        max_sampled_tokens=manifest.max_sampled_tokens,
        sampling=sampling,
        min_version=0 if credit is None else credit.min_version,
        weights_of=None if credit is None else credit.run,
        phase=0 if credit is None else credit.phase,
        shaping=None if credit is None else credit.shaping,
    )
    wrong = refusal(first)  # siblings differ in their number alone
    if wrong is not None:
        raise ConfigError(f"{place} cannot be run, nothing of it is published: {wrong}")
    return [msgspec.structs.replace(first, sample=sample) for sample in range(manifest.samples)]


async def publish_tasks(publisher: Publisher, tasks: Iterable[Task]) -> int:
    """Publish tasks and return their number once all are durable."""
    return await publish_all(publisher, TASKS, tasks)


async def ensure_manifest(bus: Bus, clock: Clock, publisher: Publisher, wanted: RunManifest) -> RunManifest:
    """Return the run's manifest, writing it when the run has none.

    Raises:
        ConfigError: the run exists with another configuration, or none of its tasks could be run.
    """
    refuse_unusable(wanted, clock.now_ms())
    known = await _recorded(bus, clock, publisher, wanted.run)
    if known is None:
        partition = partition_for(wanted.run, TRAJECTORIES.partitions)
        start = (await bus.end_offsets(TRAJECTORIES.name))[partition]
        manifest = msgspec.structs.replace(wanted, created_ms=clock.now_ms(), trajectories_start=start)
        await publisher.publish(CONTROL, manifest)
        # Somebody else may have written one meanwhile.
        known = await _recorded(bus, clock, publisher, wanted.run) or manifest
    refuse_other(known, wanted)
    return known


def refuse_unusable(manifest: RunManifest, now_ms: int) -> None:
    """Raise ConfigError if a manifest is one that no stage would run a task of."""
    try:
        run_name(manifest.run)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    wrong = manifest_refusal(manifest, now_ms)
    if wrong is not None:
        raise ConfigError(f"run {manifest.run!r}: none of its tasks could be run, nothing is published: {wrong}")


async def refuse_cancelled(bus: Bus, clock: Clock, run: str) -> None:
    """Raise ConfigError if a run is cancelled: every stage would skip what is published to it."""
    cancel = (await control_now(bus, clock)).get(f"cancel/{run}", Cancel)
    if cancel is not None:
        raise ConfigError(
            f"run {run!r} is cancelled ({cancel.cause}): its tasks would end as cancelled; use a new run name"
        )


async def require_free(bus: Bus, clock: Clock, wanted: RunManifest) -> None:
    """Raise ConfigError if `ensure_manifest` would refuse this manifest now; nothing is written."""
    refuse_unusable(wanted, clock.now_ms())
    known = (await control_now(bus, clock)).get(f"run/{wanted.run}", RunManifest)
    if known is not None:
        refuse_other(known, wanted)


async def _recorded(bus: Bus, clock: Clock, publisher: Publisher, run: str) -> RunManifest | None:
    """Return the manifest that counts; it is the last one in the log again after that, so that compaction keeps it."""
    view = await control_now(bus, clock)
    known = view.get(f"run/{run}", RunManifest)
    if known is not None and view.overruled(f"run/{run}"):
        await publisher.publish(CONTROL, known)
    return known


def refuse_other(known: RunManifest, wanted: RunManifest) -> None:
    """Raise ConfigError, naming each difference, if a run's manifest is not what somebody brings to it."""
    differing = []
    for name in SHARED:
        ours, theirs = _flat(name, getattr(wanted, name)), _flat(name, getattr(known, name))
        shared = [part for part in theirs if not (known.paced and wanted.paced and part in STAMPED)]
        differing += [f"{part} is {theirs[part]}, here {ours[part]}" for part in shared if theirs[part] != ours[part]]
    if differing:
        paced = ". A run that is paced by a trainer takes tasks from `rollmill feeder` alone" if known.paced else ""
        raise ConfigError(
            f"run {known.run!r} exists with another configuration, which all its samples share: "
            f"{'; '.join(differing)}. Use the same values, or a new run name{paced}"
        )


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Return the plain values of a field, by their names in messages."""
    if isinstance(value, msgspec.Struct):
        return {f"{name}.{part}": getattr(value, part) for part in value.__struct_fields__}
    return {name: value}


async def publish_source(bus: Bus, clock: Clock, source: TaskSource, wanted: RunManifest) -> int:
    """Publish a whole (finite) source to an unpaced run and return the number of tasks.

    Raises:
        ConfigError: the run exists with another configuration or is cancelled, or a task of it could not be run.
    """
    await refuse_cancelled(bus, clock, wanted.run)
    publisher = Publisher(bus, clock, "producer")
    manifest = await ensure_manifest(bus, clock, publisher, wanted)
    published = 0
    for instance in source.instances():
        tasks = tasks_of(manifest, source.name, instance, now_ms=clock.now_ms())
        published += await publish_tasks(publisher, tasks)
    return published
