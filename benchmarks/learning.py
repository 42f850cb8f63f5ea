"""One training run of the demo's task and model in this process, with every service on the log in memory.

    warmed(folder, seed)            the warm-started model of a seed
    played(model, run)              what it achieves on held-out hunts
    learn(folder, model, run)       trained for a number of steps, and played again
    learn_all(runs, processes)      many of these, several at once; one warm start per seed, one first measurement per
                                    seed and number format

A run is as in `rollmill demo --bus memory`: feeder, three stages, reaper, trainer, and a policy server that is handed
each version. What differs between two runs of a seed is stated in `algorithm` and `dtype`, and nothing else: all make
the same number of steps, however well they do, from the same weights on tasks of the same seeds. They are live runs:
which sample is late is luck, so two runs of a seed are alike and not equal; each replays to its own digests.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from infra.inference.base import NumberFormat, Weights
from infra.reading import partition_of, read_between
from infra.trajectories import read_run, trajectories_of
from infra.wire import unpack
from rollmill import toml
from rollmill.demo.control import rose
from rollmill.demo.evaluation import Suite, measure
from rollmill.demo.in_process import MemoryMachine
from rollmill.demo.machine import unless_broken
from rollmill.demo.recipe import Recipe
from rollmill.demo.warmstart import make_model, warm
from rollmill.watch import RunState, RunWatch
from schemas.scores import Scores
from schemas.topics import METRICS, TRAJECTORIES
from trainer.replay import ReplayReport, replay

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

RECIPE = Recipe()
"""The demo's."""

STEPS = RECIPE.min_steps
"""Trainer steps of a run: those that the demo makes at least."""

EPISODES = RECIPE.suites()[0].episodes
"""Held-out hunts of a measurement: as many as the demo's."""

DULL = 200
"""A run ends when so many groups in a row taught nothing: its policy fails alike, or succeeds alike, everywhere."""

STEP_LIMIT_S = 240.0
"""Longest wait for a trainer step, seconds: the machine may do much else."""

HUNTS_LIMIT_S = 1_200.0
"""Longest wait for a measurement, seconds."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained."""

    name: str
    """Of what differs; with the seed it names the run."""
    seed: int
    """Of model, tasks and sampling."""
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the demo's `[algorithm]`."""
    dtype: NumberFormat = "float32"
    """Number format of the engine that samples; the trainer's is always float32."""
    steps: int = STEPS
    """Trainer steps, exactly."""
    episodes: int = EPISODES
    """Held-out hunts of a measurement."""

    @property
    def id(self) -> str:
        """The run's name in the log."""
        return f"{self.name}-{self.seed}"

    @property
    def suite(self) -> Suite:
        """The demo's held-out hunts, sampled as in training."""
        return replace(RECIPE.suites()[0], episodes=self.episodes)


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What a run came to."""

    run: Run
    """What was trained."""
    after: Scores
    """On held-out hunts after the last step."""
    curve: tuple[tuple[int, float], ...]
    """(step, success of the groups around it, those that were dropped included)."""
    groups: int
    """Groups sampled: those trained on and those dropped."""
    replayed: ReplayReport
    """What replay makes of the run's decisions."""
    seconds: float
    """Of training alone."""
    figures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Each metric of the trainer, step by step."""
    formats: frozenset[str] = frozenset()
    """Number formats that the records of sampled tokens name."""
    before: Scores | None = None
    """On the same hunts of the model that it began with; none where that was not asked for."""

    @property
    def rose(self) -> bool:
        """Tell whether success rose by more than chance."""
        assert self.before is not None, "measure the warm start first"
        return rose(self.before, self.after)


def warmed(folder: Path, seed: int) -> Path:
    """Return the warm-started model of a seed, made in a folder; blocking."""
    make_model(folder / f"base-{seed}", seed)
    warm(folder / f"base-{seed}", folder / f"warm-{seed}", RECIPE, seed, lambda _: None)
    return folder / f"warm-{seed}"


async def played(model: Path, run: Run) -> Scores:
    """Return what a model achieves on the held-out hunts of a run."""
    async with MemoryMachine(model, dtype=run.dtype) as machine:
        return await unless_broken(machine, _scores(machine, run, None))


async def learn(folder: Path, model: Path, run: Run) -> Learnt:
    """Train a model and return what came of it.

    Args:
        folder: an empty one.
        model: where the run begins.
        run: what is trained.

    Raises:
        infra.errors.WaitTimeout: a step did not come in time.
    """
    path = folder / "run.toml"
    path.write_text(toml.dumps(run_toml(run, model, folder)), encoding="utf-8")
    async with MemoryMachine(model, dtype=run.dtype) as machine:
        return await unless_broken(machine, _learn(machine, path, run))


def learn_all(runs: Sequence[Run], processes: int, on_end: Callable[[Learnt], None] = lambda _: None) -> list[Learnt]:
    """Train many runs, several at once in processes of their own; return them in order.

    Args:
        runs: what is trained.
        processes: how many at once.
        on_end: told about each run that has ended, in order.
    """
    first = {(run.seed, run.dtype): run for run in reversed(runs)}
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="rollmill-learning-") as folder,
        ProcessPoolExecutor(processes, mp_context=spawn) as pool,
    ):
        place = Path(folder)
        models = _each(pool, warmed, {seed: (place, seed) for seed, _ in first})
        before = _each(pool, _play, {key: (models[run.seed], run) for key, run in first.items()})
        begun = [pool.submit(_train, models[run.seed], run) for run in runs]
        for run, waiting in zip(runs, begun, strict=True):
            found.append(replace(waiting.result(), before=before[run.seed, run.dtype]))
            on_end(found[-1])
    return found


def run_toml(run: Run, model: Path, folder: Path) -> dict[str, Any]:
    """Return the run's configuration: the demo's, but for what the run says and when it ends."""
    values = RECIPE.run_toml(run.id, run.seed, model, folder / "trainer")
    values["algorithm"] |= run.algorithm
    # Nobody is killed here, so nothing is gone on with.
    stop = {"max_steps": run.steps, "max_dropped": DULL}
    return {**values, "stop": stop, "checkpoints": {"every": run.steps}}


async def _learn(machine: MemoryMachine, path: Path, run: Run) -> Learnt:
    began = time.monotonic()
    state = await trained(machine, path, run.id, run.steps * STEP_LIMIT_S)
    seconds = time.monotonic() - began
    return Learnt(
        run=run,
        after=await _scores(machine, run, Weights(state.version, run.id)),
        curve=tuple(state.curve),
        groups=state.kept + sum(state.dropped.values()),
        replayed=await replay(machine.bus, machine.clock, run.id),
        seconds=round(seconds, 1),
        figures=await _figures(machine, run),
        formats=await _formats(machine, run),
    )


async def _figures(machine: MemoryMachine, run: Run) -> dict[str, tuple[float, ...]]:
    """Return what the trainer told of each step."""
    told: dict[str, list[float]] = defaultdict(list)
    partition = partition_of(METRICS, run.id)
    end = (await machine.bus.end_offsets(METRICS.name))[partition.partition]
    async with aclosing(read_between(machine.bus, machine.clock, {partition: 0}, {partition: end})) as records:
        async for record in records:
            message = (await unpack(METRICS, record, machine.bus)).message
            for point in message.points if message.run == run.id else ():
                told[point.name].append(point.value)
    return {name: tuple(values) for name, values in told.items()}


async def _formats(machine: MemoryMachine, run: Run) -> frozenset[str]:
    """Return the number formats that the run's records name."""
    end = (await machine.bus.end_offsets(TRAJECTORIES.name))[trajectories_of(run.id).partition]
    async with aclosing(read_run(machine.bus, machine.clock, run.id, 0, end)) as received:
        return frozenset(
            [span.dtype async for one in received if (said := one.message.transcript) for span in said.spans]
        )


async def trained(machine: MemoryMachine, path: Path, run: str, limit_s: float) -> RunState:
    """Train a run to its end and return how it stands then.

    Args:
        machine: at work.
        path: RUN.toml.
        run: the run's name.
        limit_s: longest wait for the end, seconds.

    Raises:
        infra.errors.WaitTimeout: it did not end in time.
    """
    watch = RunWatch(machine.bus, machine.clock, run)
    await watch.start()
    following = asyncio.create_task(watch.follow())
    try:
        await machine.train(path)
        await watch.until(_told, "the end and its figures", limit_s)
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
    return watch.state


def _told(state: RunState) -> bool:
    """Tell whether a run has ended and the figures of its last step are there: they are on another topic."""
    return state.ended is not None and state.step <= max((step for step, _ in state.curve), default=0)


async def _scores(machine: MemoryMachine, run: Run, weights: Weights | None) -> Scores:
    """Play the hunts with weights that may be announced before the policy serves them; None: nothing is trained."""
    found = await measure(
        machine.bus,
        machine.clock,
        run.suite,
        run=f"{run.id}-hunts",
        seed=run.seed,
        weights=weights,
        limit_s=HUNTS_LIMIT_S,
    )
    return found.scores


# ---- in a process of its own


def _each(pool: Executor, work: Callable[..., T], arguments: Mapping[K, tuple[Any, ...]]) -> dict[K, T]:
    """Return key -> what the work makes of its arguments, several at once."""
    begun = {key: pool.submit(work, *given) for key, given in arguments.items()}
    return {key: waiting.result() for key, waiting in begun.items()}


def _play(model: Path, run: Run) -> Scores:
    return asyncio.run(played(model, run))


def _train(model: Path, run: Run) -> Learnt:
    with tempfile.TemporaryDirectory(prefix="rollmill-run-") as folder:
        return asyncio.run(learn(Path(folder), model, run))
