"""Groups to train on per second, when episodes are heavy-tailed and half of the groups say nothing.

Both sides sample through the product's three stages on the in-memory bus, with simulated episodes (lognormal waits,
seeded) and the product's number of slots in RUN. Every other group, by a seeded draw, has siblings that all succeed
alike; a step takes a fixed number of the others and no time of its own.

- ours: the product's feeder, group assembler and credit with the trainer's defaults (8 groups of 8, lag 1): a group
  that is dropped is replaced at once, a straggler delays its own group, and sampling runs one batch ahead.
- the rival: synchronous dynamic sampling as DAPO publishes it (Yu et al. 2025, section 3.2, and the sampling loop of
  its recipe in verl): sample a generation batch, wait for all of it, filter, and sample another one until the training
  batch is full; what is too much is cut off. `detail.larger_batches` is the same with generation batches three times
  the training batch, as its script sets them.

The figure is kept groups per second from the first admission to the last step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import msgspec

from benchmarks.result import Result, versus
from benchmarks.rounds import Side, interleaved
from benchmarks.simulated import FAMILY, Simulated, made_transcript
from benchmarks.work import collect, ends, follow, messages, publish, subject
from infra.bus import Bus
from infra.clock import SystemClock
from infra.config import Config
from infra.memory import MemoryBus
from infra.stage import Done, Member
from infra.trajectories import read_trajectory, trajectories_of
from infra.wire import Publisher
from producers.feeder import Feeder
from producers.publish import ensure_manifest, tasks_of
from producers.source import Instance
from schemas.control import RunManifest
from schemas.messages import Episode, Rollout, Trajectory
from schemas.outcome import Completed, StopReason
from schemas.topics import CONTROL, TABLE, TRAJECTORIES
from stages.wiring import eval_stage, init_stage, run_stage
from trainer.algorithm_config import AlgorithmConfig
from trainer.config import StopConfig
from trainer.credit import credit
from trainer.groups import AssemblerState, GroupAssembler, Step
from trainer.rules import GroupRules
from trainer.terminal import terminal

SEED = 20_250_402
"""Of the waits; each round adds its number."""

SIGMA = 1.0
"""Of the logarithm of an episode's wait: the longest of 64 is about eleven times the median."""

MEDIAN_S = 0.06
"""Median wait of an episode."""

LONGEST_S = 1.2
"""Waits are cut off here."""

TOKENS = 32
"""Tokens of a transcript."""

LARGER = 3
"""Training batches in one of the rival's larger generation batches."""

LIMIT_S = 120.0
"""Longest wait for one round."""

ALGORITHM = AlgorithmConfig()
"""The trainer's defaults."""


class Sampled(Simulated):
    """The handlers: waits and success are the payload's, a list with one entry per sibling."""

    async def run(self, episode: Episode) -> Done[Rollout]:
        """Wait as long as this sibling's episode takes."""
        task = episode.task
        await self._clock.sleep(task.payload["run_s"][task.sample])
        made = made_transcript(TOKENS)
        spans = tuple(msgspec.structs.replace(span, version=task.min_version) for span in made.spans)
        return Done(
            Rollout(
                task=task,
                transcript=msgspec.structs.replace(made, spans=spans),
                verdict={},
                stop=StopReason.DONE,
                backend="simulated",
                worker=self._worker,
                tokenizer_digest="",
            )
        )

    async def eval(self, rollout: Rollout) -> Done[Trajectory]:
        """Grade at once."""
        task = rollout.task
        success = task.payload["success"][task.sample]
        outcome = Completed(components={"done": success}, reward=success, success=success, truncated=False)
        return Done(Trajectory(task=task, outcome=outcome, transcript=rollout.transcript, stage="eval"))


class Instances:
    """An endless source of groups, half of them without variance."""

    name = "replenish"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def instances(self, start: int = 0) -> Iterator[Instance]:
        """Yield the groups from the start-th on."""
        return (self._instance(row) for row in count(start))

    def _instance(self, row: int) -> Instance:
        draw = random.Random(f"{self._seed}/{row}")
        n = ALGORITHM.samples
        alike = draw.random() < 0.5
        waits = [min(LONGEST_S, MEDIAN_S * draw.lognormvariate(0, SIGMA)) for _ in range(n)]
        success = [float(alike or sample % 2) for sample in range(n)]
        payload = {"init_s": 0.0, "run_s": waits, "success": success}
        return Instance(visit=0, row=row, family=FAMILY, payload=payload)


class Sampling:
    """The log with the stages at work, shared by both sides; a round is a run of its own."""

    def __init__(self, bus: Bus, steps: int) -> None:
        self._bus = bus
        self._steps = steps
        self._clock = SystemClock()
        self._publisher = Publisher(bus, self._clock, "benchmarks")

    async def ours(self, number: int) -> float:
        """Return kept groups per second as the product feeds and decides."""
        manifest = await self._manifest(f"ours-{number}", paced=True)
        began = self._clock.monotonic()
        feeder = Feeder(self._bus, self._clock, manifest.run, Instances(SEED + number))
        feeding = asyncio.create_task(feeder.run())
        try:
            async with asyncio.timeout(LIMIT_S):
                kept = await self._decide(manifest)
        finally:
            feeding.cancel()
            with suppress(asyncio.CancelledError):
                await feeding
        return kept / (self._clock.monotonic() - began)

    async def _decide(self, manifest: RunManifest) -> int:
        """Be the trainer of a run, without a model; return the groups in all steps."""
        partition, start = trajectories_of(manifest.run), manifest.trajectories_start
        state = AssemblerState.fresh(start)
        assembler = GroupAssembler(GroupRules.of(ALGORITHM, StopConfig()), state, versions={0: 0})
        kept = 0
        await self._grant(manifest.run, assembler)
        async for record in follow(self._bus, {partition: start}):
            received = await read_trajectory(record, manifest.run, self._bus)
            if received is None:
                continue
            for event in assembler.feed(terminal(received, None, keep_tokens=False)):
                if isinstance(event, Step):
                    assembler.published(event.number, event.number)
                    kept += len(event.groups)
                await self._grant(manifest.run, assembler)
            if assembler.steps == self._steps:
                return kept
        raise AssertionError("the records of a log do not end")

    async def _grant(self, run: str, assembler: GroupAssembler) -> None:
        now = credit(run, 0, ALGORITHM, resolved=assembler.resolved, step=assembler.steps, versions=assembler.versions)
        await self._publisher.publish(CONTROL, now)

    async def rival(self, batches: int, number: int) -> float:
        """Return kept groups per second of synchronous sampling.

        Args:
            batches: training batches in a generation batch.
            number: the round.
        """
        manifest = await self._manifest(f"rival-{batches}-{number}", paced=False)
        source = Instances(SEED + number).instances()
        began = self._clock.monotonic()
        for _ in range(self._steps):
            full = 0
            while full < ALGORITHM.groups:
                chosen = [next(source) for _ in range(ALGORITHM.groups * batches)]
                await self._sample(manifest, chosen)
                full += sum(len(set(instance.payload["success"])) > 1 for instance in chosen)
        return self._steps * ALGORITHM.groups / (self._clock.monotonic() - began)

    async def _sample(self, manifest: RunManifest, chosen: list[Instance]) -> None:
        """Sample some groups and wait for all of them; what came back is what was given."""
        now_ms = self._clock.now_ms()
        tasks = [t for instance in chosen for t in tasks_of(manifest, Instances.name, instance, now_ms=now_ms)]
        start = await ends(self._bus, TRAJECTORIES)
        await publish(self._bus, tasks)
        found = await messages(TRAJECTORIES, await collect(self._bus, TRAJECTORIES, start, tasks, limit_s=LIMIT_S))
        for task in tasks:
            outcome = found[subject(task)].outcome
            assert isinstance(outcome, Completed), f"{task.id} did not complete: {outcome}"
            assert outcome.success == task.payload["success"][task.sample], f"{task.id} was graded otherwise"

    async def _manifest(self, run: str, *, paced: bool) -> RunManifest:
        wanted = RunManifest(run=run, seed=0, samples=ALGORITHM.samples, paced=paced)
        return await ensure_manifest(self._bus, self._clock, self._publisher, wanted)


@asynccontextmanager
async def sampling(steps: int) -> AsyncIterator[Sampling]:
    """Run the stages until the block is left."""
    bus, clock, config = MemoryBus(), SystemClock(), Config()
    await bus.create_topics(TABLE)
    handlers = Sampled(clock, "simulated")
    members: list[Any] = [
        Member(init_stage(handlers.init), bus, clock, worker="init", limits=config.init.limits(), first=True),
        Member(run_stage(handlers.run), bus, clock, worker="run", limits=config.run.limits()),
        Member(eval_stage(handlers.eval), bus, clock, worker="eval", limits=config.eval.limits()),
    ]
    async with asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(member.run())
        try:
            yield Sampling(bus, steps)
        finally:
            for member in members:
                member.stop()


def measure(*, quick: bool) -> Result:
    """Measure how fast groups to train on come."""
    return asyncio.run(_measure(steps=3 if quick else 10, rounds=3 if quick else 5))


async def _measure(*, steps: int, rounds: int) -> Result:
    async with sampling(steps) as at_work:
        sides: dict[str, Side] = {
            "ours": at_work.ours,
            "rival": partial(at_work.rival, 1),
            "larger": partial(at_work.rival, LARGER),
        }
        figures = await interleaved(sides, rounds=rounds)
    ours, rival = figures["ours"], figures["rival"]
    return Result(
        name="replenish",
        ours=ours.median,
        rival=rival.median,
        unit="kept groups/s",
        ratio=ours.median / rival.median,
        detail={
            "spread": {"ours": ours.spread(), "rival": rival.spread()},
            "larger_batches": versus(ours, figures["larger"], unit="kept groups/s"),
            "slots": Config().run.max_in_flight,
            "steps": steps,
            "waits": {"seed": SEED, "sigma": SIGMA, "median_s": MEDIAN_S, "longest_s": LONGEST_S},
        },
    )
