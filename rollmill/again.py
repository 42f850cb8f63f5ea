"""What a run recorded, done again from an earlier stage, as a new run: graded anew (`rescore`), or sampled anew.

The old run is only read. Its accepted outcomes are taken in the order of the log; a task keeps its source, place, seed
and siblings, and its group gets the id that the new run gives it, so `rollmill diff` can lay both beside each other.

- `rescore` gives each recorded token record and verdict to a grader: no engine, no environment, the same tokens. What
  never completed stays as it was. The outcomes may become the log of a new run, whose trainer takes them with
  `algorithm.replayed`: the versions that sampled them are marked as another run's. What the grader fails on is failed
  there. No task is published, since no stage has anything to do: each outcome brings its sample along (`REPLAYED`), and
  the manifest says which outcomes there must be, so `rollmill check` finds one that is missing.
- `resample` publishes the tasks: environments and engine are asked again. The sampling seeds are the same; so are the
  tokens, where engine and weights are.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from infra.bus import Bus
from infra.clock import Clock
from infra.control import control_now
from infra.errors import ConfigError, Failure
from infra.trajectories import read_run, trajectories_of
from infra.wire import Publisher
from producers.publish import ensure_manifest, publish_tasks, refuse_cancelled
from schemas.arbiter import Arbiter, Ruling
from schemas.control import RunManifest
from schemas.dispositions import REPLAYED
from schemas.identity import group_id, redriven_place
from schemas.messages import Rollout, Task, Trajectory
from schemas.outcome import Completed
from schemas.topics import TRAJECTORIES
from stages.eval.stage import grade
from stages.handlers.registry import handler

MAX_NAMED = 20
"""Most samples that are named in a report; the others are counted."""

AT_ONCE = 256
"""Tasks that are published together."""


@dataclass(frozen=True, kw_only=True)
class Regrade:
    """A sample that the grader sees otherwise."""

    sample: str
    """`group/sample` in the old run."""
    before: float
    """Recorded reward."""
    after: float
    """Reward now."""


@dataclass
class Rescored:
    """What a grader makes of a run's recorded outcomes."""

    run: str
    grader: str | None
    """Family whose grader was asked; each task's own if none."""
    graded: int = 0
    """Completed samples that were graded anew."""
    same: int = 0
    """Those with the same reward and success as recorded."""
    other: int = 0
    """Those with another one."""
    failed: int = 0
    """Those that the grader failed on."""
    left: int = 0
    """Samples that never completed: they are as they were."""
    success_before: float = 0.0
    """Sum of the recorded success of what was graded."""
    success_after: float = 0.0
    """Sum of their success now."""
    named: list[Regrade] = field(default_factory=list)
    """The first ones that differ."""
    causes: dict[str, int] = field(default_factory=dict)
    """Why the grader failed, and how often."""
    into: str | None = None
    """Run that the outcomes were published to."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    def add(self, before: Trajectory, after: Trajectory | Failure) -> None:
        """Count one graded sample."""
        assert isinstance(before.outcome, Completed), "only what completed is graded"
        self.graded += 1
        self.success_before += before.outcome.success
        if isinstance(after, Failure):
            self.failed += 1
            self.causes[str(after)] = self.causes.get(str(after), 0) + 1
            return
        assert isinstance(after.outcome, Completed), "a grade completes a sample"
        self.success_after += after.outcome.success
        if before.outcome == after.outcome:
            self.same += 1
            return
        self.other += 1
        if len(self.named) < MAX_NAMED:
            name = f"{before.task.group}/{before.task.sample}"
            self.named.append(Regrade(sample=name, before=before.outcome.reward, after=after.outcome.reward))


async def rescore(bus: Bus, clock: Clock, run: str, *, grader: str | None = None, into: str | None = None) -> Rescored:
    """Grade what a run recorded anew.

    Args:
        bus: the log.
        clock: time.
        run: the run.
        grader: family whose grader is asked; each task's own unless given.
        into: publish the outcomes as this new run's.

    Raises:
        ConfigError: the run or the grader is unknown, or `into` has records already.
    """
    _require_grader(grader)
    manifest = await _manifest(bus, clock, run)
    publisher = Publisher(bus, clock, "replay")
    bounds = await _bounds(bus, manifest)
    if into is not None:
        origin = {"replay_of": run, "from": "eval", "grader": grader, "replayed": list(bounds)}
        await _begin(bus, clock, publisher, manifest, into, origin)
    found = Rescored(run=run, grader=grader, into=into)
    async with aclosing(accepted(bus, clock, manifest, bounds)) as outcomes:
        async for before in outcomes:
            after = await _graded(before, grader, found)
            if into is not None:
                await publisher.publish(TRAJECTORIES, _of_another_run(after, into))
    return found


def _require_grader(grader: str | None) -> None:
    """Raise ConfigError unless the grader can be asked: otherwise every sample would fail, in a new run too."""
    try:
        if grader is not None:
            handler(grader)
    except Failure as failure:
        raise ConfigError(f"no grader {grader!r} to grade with, nothing was written: {failure.cause}") from failure


async def _graded(before: Trajectory, grader: str | None, found: Rescored) -> Trajectory:
    """Return an outcome as the grader sees it; failed if it fails on it."""
    if not isinstance(before.outcome, Completed) or before.transcript is None or before.stop is None:
        found.left += 1
        return before
    rollout = Rollout(
        task=before.task,
        transcript=before.transcript,
        verdict=before.verdict or {},
        stop=before.stop,
        backend=before.backend,
        worker="replay",
        tokenizer_digest=before.tokenizer_digest,
    )
    try:
        after = (await grade(rollout, grader)).message
    except Failure as failure:
        found.add(before, failure)
        return msgspec.structs.replace(before, outcome=failure.outcome())
    found.add(before, after)
    return after


async def resample(bus: Bus, clock: Clock, run: str, *, into: str) -> int:
    """Publish the tasks of a run's accepted outcomes as a new run's; return how many.

    Raises:
        ConfigError: the run is unknown, or `into` has records already or is cancelled.
    """
    manifest = await _manifest(bus, clock, run)
    publisher = Publisher(bus, clock, "replay")
    await refuse_cancelled(bus, clock, into)
    await _begin(bus, clock, publisher, manifest, into, {"replay_of": run, "from": "run"})
    start_by_ms = clock.now_ms() + int(manifest.start_within_s * 1000)
    published, batch = 0, list[Task]()
    async with aclosing(accepted(bus, clock, manifest)) as outcomes:
        async for outcome in outcomes:
            # Nobody's credit is used up, whatever version the engine has now may sample, and no failure was met yet.
            free = {"start_by_ms": start_by_ms, "admission": None, "min_version": 0, "weights_of": None, "attempt": 0}
            batch.append(msgspec.structs.replace(moved(outcome.task, into), **free))
            if len(batch) == AT_ONCE:
                published += await publish_tasks(publisher, batch)
                batch = []
    return published + await publish_tasks(publisher, batch)


async def accepted(
    bus: Bus, clock: Clock, manifest: RunManifest, bounds: tuple[int, int] | None = None
) -> AsyncGenerator[Trajectory]:
    """Yield the accepted outcomes of a run, in the order of the log.

    Args:
        bus: the log.
        clock: time.
        manifest: the run.
        bounds: between which offsets; all that is there now unless given.
    """
    start, end = bounds or await _bounds(bus, manifest)
    arbiter = Arbiter()
    async with aclosing(read_run(bus, clock, manifest.run, start, end)) as outcomes:
        async for received in outcomes:
            task, offset = received.message.task, received.record.offset
            if arbiter.rule(task.group, task.sample, task.payload_digest, offset) is Ruling.ACCEPTED:
                yield received.message


def _of_another_run(outcome: Trajectory, run: str) -> Trajectory:
    """Return an outcome as another run's, whose weights did not sample it."""
    transcript = outcome.transcript
    if transcript is not None:
        was = outcome.task.weights_of or outcome.task.run
        spans = tuple(msgspec.structs.replace(span, weights_of=span.weights_of or was) for span in transcript.spans)
        transcript = msgspec.structs.replace(transcript, spans=spans)
    return msgspec.structs.replace(outcome, task=moved(outcome.task, run), transcript=transcript, stage=REPLAYED)


def moved(task: Task, run: str) -> Task:
    """Return a task as that of another run: the same place, seed and siblings, another group id."""
    place = task.source if task.redrive_of is None else redriven_place(task.source, task.redrive_of)
    group = group_id(run, place, task.visit, task.row, task.payload)
    return msgspec.structs.replace(task, run=run, group=group)


async def _bounds(bus: Bus, manifest: RunManifest) -> tuple[int, int]:
    """Return the offsets between which a run's outcomes lie now."""
    partition = trajectories_of(manifest.run)
    begin = (await bus.begin_offsets(partition.topic))[partition.partition]
    end = (await bus.end_offsets(partition.topic))[partition.partition]
    return max(begin, manifest.trajectories_start), end


async def _manifest(bus: Bus, clock: Clock, run: str) -> RunManifest:
    view = await control_now(bus, clock)
    found = view.get(f"run/{run}", RunManifest)
    if found is None:
        known = ", ".join(sorted(manifest.run for manifest in view.all(RunManifest))) or "none"
        raise ConfigError(f"there is no run {run!r} in this log; known runs: {known}")
    return found


async def _begin(
    bus: Bus, clock: Clock, publisher: Publisher, of: RunManifest, into: str, origin: dict[str, Any]
) -> None:
    """Write the manifest of a new run made of another one.

    Raises:
        ConfigError: the new run has outcomes already.
    """
    wanted = msgspec.structs.replace(of, run=into, paced=False, extra={**of.extra, **origin})
    manifest = await ensure_manifest(bus, clock, publisher, wanted)
    async with aclosing(accepted(bus, clock, manifest)) as outcomes:
        async for _ in outcomes:
            raise ConfigError(f"run {into!r} has outcomes already: give the replay of {of.run!r} a new name")
