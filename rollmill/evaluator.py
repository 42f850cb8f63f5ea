"""Plays a suite of tasks through the whole pipeline with one version of a policy, and returns the figures.

A suite is a run of its own, with a manifest that says what it evaluates; nobody trains on it. It is published with the
version as its lowest one, and a sample in which another version had a part does not count. What the system failed, or
other weights had a part in, is played once more: as another group, since a decided one is never reopened, with the
same seeds. A sample without an outcome when its time was up is missing. Ids and seeds are derived: whoever plays the
same suite with the same version again, because the trainer died meanwhile, finds what has ended already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from infra.bus import Bus
from infra.clock import Clock
from infra.errors import ConfigError
from infra.inference.base import Weights
from infra.middleware.deadline import reap_at_ms
from infra.trajectories import TrajectoryReader
from infra.wire import Publisher
from producers.collect import endings
from producers.publish import ensure_manifest, publish_tasks, tasks_of
from producers.source import TaskSource
from producers.sources import Described, describe, make_source
from schemas.control import RunManifest
from schemas.identity import group_id
from schemas.messages import SampleId, Task, Trajectory
from schemas.outcome import Completed
from schemas.scores import Purpose, Scores
from trainer.config import EvaluationConfig, RunConfig
from trainer.curriculum import final_stamp, stamp
from trainer.evaluation import Played, scores
from trainer.suite import counts

log = logging.getLogger(__name__)

LATE_S = 1_900.0
"""After a sample's time is up the reaper's word is waited for so long, seconds: it adds outages of up to 30 minutes."""

INHERITED = ("max_tokens", "max_sampled_tokens", "stop_sequences", "repetition", "budgets")
"""Limits of `[tasks]` that hold for the suite too, unless it gives its own."""

SECTION = "evaluation.tasks"
"""Where RUN.toml describes the suite."""

SUITE = "validation"
"""Name of the suite's source: its seeds are not those of the tasks that are trained on."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one sample of a suite ended."""

    task: Task
    """What was asked for first."""
    trajectory: Trajectory | None
    """Its outcome, of the second try if there was one; none if nothing came in time."""
    counts: bool
    """It was graded, and no other version had a part in it."""

    @property
    def played(self) -> Played:
        """The same as figures need it."""
        found, task = self.trajectory, self.task.group
        graded = found is not None and isinstance(found.outcome, Completed)
        if not self.counts or found is None or not isinstance(found.outcome, Completed):
            return Played(task=task, mixed=graded)
        turns = found.transcript.turns if found.transcript else ()
        return Played(
            task=task,
            success=found.outcome.success,
            reward=found.outcome.reward,
            turns=len(turns),
            valid=sum(turn.valid for turn in turns),
        )


class PipelineEvaluator:
    """Evaluates the versions of one run (`trainer.evaluation.Evaluator`)."""

    def __init__(self, bus: Bus, clock: Clock, run: RunConfig, folder: Path) -> None:
        """Read the suite.

        Args:
            bus: the log.
            clock: for limits.
            run: the run, with an `[evaluation]`.
            folder: relative paths in it start here.

        Raises:
            ConfigError: the suite is none, or has no end.
        """
        if run.evaluation is None:
            raise ConfigError(f"run {run.run!r} has no [evaluation]")
        self._bus = bus
        self._clock = clock
        self._run = run
        self._config = run.evaluation
        self._tasks, self._source = suite_of(run.evaluation, run.tasks, folder)

    async def evaluate(self, version: int, step: int, purpose: Purpose) -> Scores:
        """Play the suite; see the protocol."""
        manifest = self._manifest(version, step, purpose)
        ended = await play(self._bus, self._clock, self._source, manifest, weights=Weights(version, self._run.run))
        # Bootstraps of a large suite take seconds, and the trainer shares this event loop.
        return await asyncio.to_thread(scores, manifest.run, [one.played for one in ended])

    def _manifest(self, version: int, step: int, purpose: Purpose) -> RunManifest:
        run, algorithm, config = self._run, self._run.algorithm, self._config
        evaluation = purpose is Purpose.EVALUATION
        # A version is measured by what it is trained for; the gate by what it will be trained with first.
        stamped = final_stamp(algorithm, run.curriculum) if evaluation else stamp(algorithm, run.curriculum, 0)
        given = config.temperature if evaluation else None
        return RunManifest(
            # Steps are made again after a rollback; a version is never another one's.
            run=f"{run.run}.{'eval' if evaluation else 'gate'}.{step}.v{version}",
            seed=run.seed,
            samples=config.samples if evaluation else algorithm.samples,
            budgets=self._tasks.budgets,
            horizon=stamped.horizon,
            max_sampled_tokens=self._tasks.max_sampled_tokens,
            sampling=self._tasks.sampling(stamped.temperature if given is None else given),
            start_within_s=config.start_within_s,
            extra={"evaluates": {"run": run.run, "step": step, "version": version, "for": purpose.value}},
        )


def evaluator_of(bus: Bus, clock: Clock, run: RunConfig, folder: Path) -> PipelineEvaluator | None:
    """Return what plays a run's suite; none if it has no `[evaluation]`. Raises ConfigError."""
    return PipelineEvaluator(bus, clock, run, folder) if run.evaluation is not None else None


def suite_of(config: EvaluationConfig, tasks: dict[str, Any], folder: Path) -> tuple[Described, TaskSource]:
    """Return an evaluation's suite, as described and as a source. Raises ConfigError."""
    limits = {key: tasks[key] for key in INHERITED if key in tasks}
    described = describe({"name": SUITE, **limits, **config.tasks, "repeat": False}, SECTION)
    if described.family and described.count is None:
        raise ConfigError(f"[{SECTION}]: a suite has an end; give `count`, the number of tasks of the family")
    return described, make_source(described, folder, SECTION)


async def play(
    bus: Bus,
    clock: Clock,
    source: TaskSource,
    wanted: RunManifest,
    *,
    weights: Weights | None = None,
    limit_s: float | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[Ended]:
    """Play a suite and return how each of its samples ended.

    Args:
        bus: the log.
        clock: for limits.
        source: the tasks, with an end.
        wanted: the run under which they are played.
        weights: the only ones that may sample; any unless given.
        limit_s: longest wait for the outcomes, seconds; until the tasks' own time is up unless given.
        on_progress: told how many samples have ended.

    Raises:
        ConfigError: the run exists with another configuration.
    """
    publisher = Publisher(bus, clock, "producer")
    manifest = await ensure_manifest(bus, clock, publisher, wanted)
    now_ms = clock.now_ms()
    tasks = [
        task if weights is None else msgspec.structs.replace(task, min_version=weights.version, weights_of=weights.run)
        for instance in source.instances()
        for task in tasks_of(manifest, source.name, instance, now_ms=now_ms)
    ]
    async with TrajectoryReader.on(bus, clock, manifest.run, start=manifest.trajectories_start) as reader:
        playing = _Playing(clock, publisher, reader, limit_s, on_progress)
        await playing.play(tasks)
        version = None if weights is None else weights.version
        again = {task.id: second_try(task) for task in tasks if _went_wrong(playing.known.get(task.id), version)}
        if again:
            log.info("run %s: %d of %d samples are played once more", manifest.run, len(again), len(tasks))
            await playing.play(list(again.values()))
    ends = [(task, playing.known.get(again.get(task.id, task).id)) for task in tasks]
    return [Ended(task=task, trajectory=end, counts=counts(end, version)) for task, end in ends]


@dataclass
class _Playing:
    """Publishes tasks of one run and waits for their ends."""

    clock: Clock
    publisher: Publisher
    reader: TrajectoryReader
    limit_s: float | None
    on_progress: Callable[[int], None]
    known: dict[SampleId, Trajectory] = field(default_factory=dict)
    """What has ended."""

    async def play(self, tasks: Sequence[Task]) -> None:
        """Return once all of them have ended, or their time is up."""
        await publish_tasks(self.publisher, tasks)
        ids = [task.id for task in tasks]
        until_ms = self._until_ms(tasks)
        silent = await endings(
            self.reader, self.clock, ids, self.known, until_ms=until_ms, on_progress=self.on_progress
        )
        if silent:
            log.warning(
                "waited for the outcomes of %d samples until their time was up, nothing came of %d of them, first %s; "
                "`rollmill status` shows which stage is behind, and whether the reaper is there",
                *(len(ids), len(silent), min(silent)),
            )

    def _until_ms(self, tasks: Sequence[Task]) -> int:
        if self.limit_s is not None:
            return self.clock.now_ms() + int(self.limit_s * 1000)
        return max(map(reap_at_ms, tasks), default=0) + int(LATE_S * 1000)


def second_try(task: Task) -> Task:
    """Return a task whose sample failed, as a sample of another group; the seeds stay, for it is the same work."""
    visit = task.visit + 1  # a suite is passed once: nobody else has this place
    group = group_id(task.run, task.source, visit, task.row, task.payload)
    return msgspec.structs.replace(task, group=group, visit=visit, redrive_of=task.group)


def _went_wrong(trajectory: Trajectory | None, version: int | None) -> bool:
    return trajectory is not None and not counts(trajectory, version)
