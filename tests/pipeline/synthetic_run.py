"""A run made up for the trainer: trajectories with real token records on the memory bus, and a bus that dies."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import numpy as np

from infra.bus import TopicPartition
from infra.clock import SystemClock
from infra.control import ControlView
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from schemas.control import Credit, PolicyVersion
from schemas.decisions import Alarm, Branch, GroupDropped, RunEnded, StepDecided, VersionPublished, live_decisions
from schemas.messages import Task, Trajectory
from schemas.outcome import Boundary, Cancelled, Completed, Failed, FailureKind
from schemas.partition import partition_for
from schemas.topics import METRICS, TABLE, TASKS, TRAJECTORIES
from schemas.transcript import SampledSpan, Sampling, Transcript, Turn, pack_logprobs, pack_tokens
from trainer import checkpoint
from trainer.config import make_config
from trainer.decision_log import read_decisions
from trainer.models import Shape, create_wordlevel_model

VOCABULARY = 20
SAMPLES = 3
RUN = "r"


def small_model(directory, hidden=16):
    """Write a model of a few thousand parameters."""
    shape = Shape(hidden=hidden, layers=1, heads=2, intermediate=32, context=64)
    create_wordlevel_model(directory, seed=0, words=[f"w{i}" for i in range(VOCABULARY - 7)], shape=shape)


def run_config(tmp_path, model, name="one", **changes):
    """Return a configuration whose directories lie under tmp_path/name."""
    algorithm = {"groups": 2, "samples": SAMPLES, "max_lag": 99, "epochs": 1, "minibatches": 1, "min_siblings": 2}
    stop = {"max_steps": 4}
    return make_config(
        {
            "run": RUN,
            "model": model,
            "directory": tmp_path / name,
            "algorithm": {**algorithm, **changes.pop("algorithm", {})},
            "stop": {**stop, **changes.pop("stop", {})},
            **changes,
        }
    )


async def memory_bus():
    """Return a memory bus with all topics."""
    bus = MemoryBus(SystemClock())
    await bus.create_topics(TABLE)
    return bus


def task(number, sample, *, run=RUN, admission=None):
    """Return the task of one sample."""
    return Task(
        run=run,
        group=f"g{number:04d}",
        sample=sample,
        samples=SAMPLES,
        source="made up",
        row=number,
        payload={"n": number},
        payload_digest=f"digest-{number}",
        family="made-up",
        seed=number,
        admission=number if admission is None else admission,
        start_by_ms=0,
    )


def trajectory(task, success, *, version=0, seed=0, turn_rewards=(), truncated=False):
    """Return a graded trajectory of two turns."""
    draw = np.random.default_rng([seed, task.row, task.sample])
    tokens = draw.integers(0, VOCABULARY, 10)
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0, 0], dtype=np.uint8)
    spans = [
        SampledSpan(
            start=start,
            stop=stop,
            version=version,
            sampling=Sampling(),
            dtype="float32",
            logprobs_mode="processed_logprobs",
        )
        for start, stop in ((2, 4), (5, 8))
    ]
    turns = [
        Turn(
            start=start,
            sampled=sampled,
            stop=stop,
            valid=True,
            action="",
            finish="stop",
            began_ms=0,
            generated_ms=0,
            ended_ms=0,
        )
        for start, sampled, stop in ((0, 2, 4), (4, 5, 8))
    ]
    record = Transcript(
        tokens=pack_tokens(tokens),
        mask=mask.tobytes(),
        logprobs=pack_logprobs(np.where(mask, draw.normal(-3, 0.2, 10), 0.0)),
        spans=tuple(spans),
        turns=tuple(turns),
    )
    outcome = Completed(
        components={"done": success}, reward=success, success=success, truncated=truncated, turn_rewards=turn_rewards
    )
    return Trajectory(task=task, outcome=outcome, transcript=record, verdict={}, stage="eval")


def failure(task):
    """Return a trajectory that says nothing about the policy."""
    outcome = Failed(kind=FailureKind.INFRASTRUCTURE, boundary=Boundary.ENVIRONMENT, cause="made up")
    return Trajectory(task=task, outcome=outcome, stage="run")


def cancelled(task):
    """Return the record of a withdrawn sample."""
    return Trajectory(task=task, outcome=Cancelled(cause="made up"), stage="reaper")


async def record_trajectories(bus, *, groups=30, seed=0, process=False, run=RUN, begin=0):
    """Publish interleaved trajectories of many groups, with repeats and failures between them.

    With `process` most of them have process rewards, and some are truncated. Of a log that is written in two parts the
    second one begins behind so many groups.
    """
    draw = random.Random(seed + begin)
    publisher = Publisher(bus, SystemClock(), "test")
    pending = [(g, s) for g in range(begin, groups) for s in range(SAMPLES)]
    pending.sort(key=lambda item: item[0] + draw.random() * 4)
    for number, sample in pending:
        what = task(number, sample, run=run)
        more = _process(number, sample) if process else {}
        if draw.random() < 0.08:
            made = failure(what)
        else:
            made = trajectory(what, float(draw.random() < 0.5), seed=seed, **more)
        await publisher.publish(TRAJECTORIES, made)
        if draw.random() < 0.1:
            await publisher.publish(TRAJECTORIES, trajectory(what, 1.0, seed=seed + 1))


def _process(number, sample):
    """Return what only some families and some endings have."""
    draw = random.Random(number * SAMPLES + sample)
    turn_rewards = () if draw.random() < 0.2 else (draw.choice([0.0, 0.5]), draw.choice([0.0, 0.25]))
    return {"turn_rewards": turn_rewards, "truncated": draw.random() < 0.3}


async def decisions(bus, run=RUN):
    """Return every decision in the log, live or not."""
    return await read_decisions(bus, SystemClock(), run)


async def live(bus):
    """Return the live decisions."""
    return [decision for _, decision in live_decisions(await decisions(bus))]


async def points(bus):
    """Return the run's points of `metrics`."""
    partition = TopicPartition("metrics", partition_for(RUN, METRICS.partitions))
    return [point for message in await records_of(bus, METRICS, partition) for point in message.points]


async def course(bus):
    """Return how the run went: its steps, versions, returns, alarms and ends, as the live decisions have them."""
    said = []
    for decision in await live(bus):
        match decision:
            case StepDecided():
                said.append((decision.step, decision.position, decision.digest))
            case VersionPublished():
                said.append((decision.step, decision.version, decision.digest))
            case Branch():
                said.append((decision.from_step, decision.position, decision.cause, decision.lr_scale))
            case Alarm():
                said.append((decision.step, decision.guard, decision.value, decision.action, decision.cause))
            case RunEnded():
                said.append(decision.reason)
    return said


def told(log):
    """Return what the live decisions say, without who wrote them; an end that is said again is said once."""
    said: list[tuple] = []
    for _, decision in live_decisions(log):
        match decision:
            case StepDecided():
                said.append((decision.step, decision.position, decision.digest, decision.advantage_digest))
            case GroupDropped():
                said.append((decision.group, decision.reason, decision.position, decision.members))
            case VersionPublished():
                said.append((decision.step, decision.version, decision.digest))
            case Branch():
                said.append((decision.from_step, decision.position))
            case RunEnded():
                end = (decision.position, decision.step, decision.reason, decision.unused)
                said += [end] if said[-1:] != [end] else []
            case _:
                pass
    return said


def learned(config):
    """Return step, batch digest, weights and optimizer of the last checkpoint."""
    last = checkpoint.latest(config.checkpoints_directory)
    return last.state.step, last.state.digest, last.weights.read_bytes(), last.optimizer()


class Killed(BaseException):
    """The process died here."""


class MortalBus:
    """A bus whose process dies at the n-th publication, just before it or just after it."""

    def __init__(self, bus, at, *, after):
        self._bus = bus
        self._left = at
        self._after = after

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def publish(self, *args, **kwargs):
        """Publish, or die."""
        self._left -= 1
        if self._left == 0 and not self._after:
            raise Killed
        position = await self._bus.publish(*args, **kwargs)
        if self._left == 0:
            raise Killed
        return position


class Sampler:
    """Feeder, stages and policy in one: samples groups as far as the credit goes, with the version announced last."""

    def __init__(self, bus, *, seed=0, success=lambda draw: float(draw.random() < 0.5)):
        self._bus = bus
        self._draw = random.Random(seed)
        self._success = success
        self._publisher = Publisher(bus, SystemClock(), "test")
        self._control = ControlView(bus, SystemClock())
        self.admitted = 0
        self.used = []
        self.closed = False

    async def run(self):
        """Sample until the credit is closed."""
        await self._control.start()
        following = asyncio.create_task(self._control.follow())
        try:
            while not self.closed:
                await self._sample()
                await self._control.changed(1.0)
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            await self._control.close()

    async def _sample(self):
        credit = self._control.get(f"credit/{RUN}", Credit)
        version = self._control.get(f"policy/{RUN}", PolicyVersion)
        if credit is None or version is None:
            return
        self.closed = credit.closed
        while self.admitted < credit.admit_up_to and not credit.closed:
            assert version.version >= credit.min_version
            for sample in range(SAMPLES):
                success = self._success(self._draw)
                made = trajectory(task(self.admitted, sample), success, version=version.version)
                await self._end(made)
            self.used.append((self.admitted, version.version))
            self.admitted += 1

    async def _end(self, made):
        await self._publisher.publish(TRAJECTORIES, made)


class SlowSampler(Sampler):
    """A sampler of which one sample does not end: its first one, unless it is told at which version it does."""

    def __init__(self, bus, *, ends_at=None, **options):
        super().__init__(bus, **options)
        self._ends_at = ends_at
        self._held = []

    async def _end(self, made):
        if (made.task.row, made.task.sample) == (0, 0):
            # The reaper knows of it, and that its time is up.
            await self._publisher.publish(TASKS, made.task)
            self._held.append(made)
        else:
            await super()._end(made)

    async def _sample(self):
        await super()._sample()
        version = self._control.get(f"policy/{RUN}", PolicyVersion)
        if self._held and version is not None and self._ends_at is not None and version.version >= self._ends_at:
            await super()._end(self._held.pop())


async def records_of(bus, topic, partition, start=0):
    """Return the messages of one partition of a topic."""
    reader = await bus.read({(partition): start})
    found = [(await unpack(topic, record)).message for record in await reader.poll(10_000, 0)]
    await reader.close()
    return found
