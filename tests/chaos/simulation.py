"""The real stages, reaper and host on the log in memory, in virtual time, while a seed breaks things.

What is broken: acknowledgements (a record that was refused, and one that is in the log although its producer was told
otherwise), commits, workers (killed without a word; stopped like SIGSTOP, so that they work on after their partitions
went to others), the environment host (restarted with all leases lost), the policy (busy, away, garbage), the reaper
(killed, and two at once). One seed gives one history: `History.digest` is the same each time.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from infra.bus import Bus, Committed, Consumer, Position, TopicPartition
from infra.config import Config, StageConfig
from infra.errors import BusError
from infra.memory import MemoryBus
from infra.wire import Publisher
from producers.collect import outcomes
from producers.generated import GeneratedSource
from producers.publish import ensure_manifest, publish_tasks, tasks_of
from producers.reaper import Reaper
from rollmill.ledger import ledger
from schemas.control import RunManifest
from schemas.messages import Budgets, Trajectory
from schemas.topics import EVENTS, METRICS, TABLE
from stages.pipeline import Outside, Pipeline
from stages.run.render import Renderer
from tests.chaos.virtual_loop import InPlace, LoopClock
from tests.logs import read_all
from tests.pipeline.faulty import FaultyPolicy, RestartingHost

SAMPLES = 4
GROUPS = 12
CHAOS_S = 30.0
"""So long things break, in virtual seconds; tasks are published all the while."""

FAULT_EVERY_S = 1.5
"""Mean time between two faults, in virtual seconds."""

TURN_S = 0.5
"""Mean time of a generation, in virtual seconds: an episode takes a few turns, so faults find it in flight."""

MOST_WORKERS = 5
"""Workers at once."""

FROZEN_S = 20.0
"""So long a worker works on that believes in partitions it has lost, in virtual seconds."""

START_WITHIN_S = 300.0
"""Tasks start within this time, in virtual seconds: what slips through every other net is the reaper's soon after."""

LIMIT_S = 3600.0
"""By then every sample has its outcome: attempts, budgets and the reaper's grace lie before it."""

BUDGETS = Budgets(init_s=60.0, run_s=120.0, eval_s=60.0)
CONFIG = Config(init=StageConfig(max_in_flight=8), run=StageConfig(max_in_flight=8), eval=StageConfig(max_in_flight=8))


class SlowPolicy(FaultyPolicy):
    """An engine that takes its time."""

    async def generate(self, *arguments, **settings):
        """Answer after a while, or fail."""
        await asyncio.sleep(self._dice.expovariate(1 / TURN_S))
        return await super().generate(*arguments, **settings)


class FaultyBus(MemoryBus):
    """A log whose answers get lost, as its seed says, while it is told to fail."""

    def __init__(self, clock: LoopClock, dice: random.Random) -> None:
        super().__init__(clock)
        self.failing = False
        self.lost: Counter[str] = Counter()
        """What got lost, and how often."""
        self._dice = dice

    async def publish(self, topic, value, **where) -> Position:
        """Append late, or not at all, or without saying so."""
        if not self.failing:
            return await super().publish(topic, value, **where)
        await self.clock.sleep(self._dice.expovariate(50))
        fate = self._dice.random()
        if fate < 0.02:
            self.lost["record"] += 1
            raise BusError(f"publishing to {topic}: refused by chaos")
        position = await super().publish(topic, value, **where)
        if fate > 0.98:
            self.lost["acknowledgement"] += 1
            raise BusError(f"publishing to {topic}: in the log, and the answer was lost by chaos")
        return position

    def before_commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Let a commit through, or not."""
        if self.failing and self._dice.random() < 0.2:
            self.lost["commit"] += 1
            raise BusError("committing: lost by chaos")


class Link:
    """One worker's way to the log: everything goes through, and what it joined as is known."""

    def __init__(self, bus: Bus) -> None:
        self.joined: list[Consumer] = []
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def join(self, *arguments: Any, **settings: Any) -> Consumer:
        """Join a consumer group."""
        member = await self._bus.join(*arguments, **settings)
        self.joined.append(member)
        return member


@dataclass(frozen=True)
class Worker:
    """A process of all three stages, at work."""

    link: Link
    pipeline: Pipeline
    running: asyncio.Task[None]


@dataclass
class History:
    """What a seed made of a run."""

    outcomes: list[Trajectory]
    """The accepted ones."""
    counts: dict[str, int]
    """Samples by disposition."""
    violations: list[str]
    """What contradicts the rules."""
    records: int
    """Records on all topics but events and metrics."""
    digest: str
    """Of where and when every one of them lies."""
    broken: list[str]
    """What was done to it, in order."""
    lost: Counter[str]
    """What the log lost, and how often."""


class Simulation:
    """One run under chaos."""

    def __init__(self, seed: int, renderer: Renderer) -> None:
        self._dice = random.Random(seed)
        self._clock = LoopClock()
        self._bus = FaultyBus(self._clock, random.Random(seed + 1))
        self._policy = SlowPolicy(renderer, seed=seed, garbage=0.02, busy=0.1)
        self._host = RestartingHost(self._clock, threads=InPlace())  # the order of real ones is luck
        self._outside = Outside(host=self._host, policy=self._policy, renderer=renderer)
        self._manifest = RunManifest(
            run="chaos", seed=seed, samples=SAMPLES, budgets=BUDGETS, start_within_s=START_WITHIN_S
        )
        self._workers: list[Worker] = []
        self._named = 0
        self._broken: list[str] = []

    async def run(self) -> History:
        """Publish, break, heal, and wait for every outcome."""
        await self._bus.create_topics(TABLE)
        await ensure_manifest(self._bus, self._clock, Publisher(self._bus, self._clock, "producer"), self._manifest)
        async with self._host:
            services = [asyncio.create_task(self._kept(lambda: Reaper(self._bus, self._clock).run())) for _ in range(2)]
            for _ in range(3):
                self._start_worker()
            _, samples = await asyncio.gather(self._break_things(), self._publish())
            found = await outcomes(self._bus, self._clock, self._manifest, samples, limit_s=LIMIT_S)
            for worker in self._workers:
                worker.pipeline.stop()
            await asyncio.wait([worker.running for worker in self._workers])
            for service in services:
                service.cancel()
            await asyncio.wait(services)
            books = await ledger(self._bus, self._clock, self._manifest.run)
        records, digest = await self._digest()
        return History(found, books.counts(), books.violations, records, digest, self._broken, self._bus.lost)

    async def _publish(self) -> int:
        """Publish two groups at a time, each pair again until the log has said that it is there."""
        samples = 0
        publisher = Publisher(self._bus, self._clock, "producer")
        instances = list(GeneratedSource("keydoor", {"size": 4}, count=GROUPS).instances(0))
        for at in range(0, GROUPS, 2):
            tasks = [
                task
                for instance in instances[at : at + 2]
                for task in tasks_of(self._manifest, "chaos", instance, now_ms=self._clock.now_ms())
            ]
            while True:
                with suppress(BusError):
                    samples += await publish_tasks(publisher, tasks)
                    break
            await self._clock.sleep(2 * CHAOS_S / GROUPS)
        return samples

    def _start_worker(self) -> None:
        self._named += 1
        link = Link(self._bus)
        pipeline = Pipeline(link, self._clock, CONFIG, self._outside, worker=f"worker-{self._named}")
        self._workers.append(Worker(link, pipeline, asyncio.create_task(self._supervised(pipeline))))

    async def _supervised(self, pipeline: Pipeline) -> None:
        """Run a worker; one that the log ends is replaced, as a supervisor does."""
        try:
            await pipeline.run()
        except* BusError:
            await self._clock.sleep(1.0)
            self._start_worker()

    async def _kept(self, make: Callable[[], Awaitable[None]]) -> None:
        while True:
            with suppress(BusError):
                await make()
            await self._clock.sleep(1.0)

    async def _break_things(self) -> None:
        self._bus.failing = True
        until = self._clock.monotonic() + CHAOS_S
        faults = [self._kill, self._kill, self._freeze, self._restart_host, self._grow, self._policy_away]
        while self._clock.monotonic() < until:
            await self._clock.sleep(self._dice.expovariate(1 / FAULT_EVERY_S))
            await self._dice.choice(faults)()
        self._bus.failing = False
        if not self._alive():
            self._start_worker()

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers if not worker.running.done()]

    async def _expelled(self, what: str) -> list[Worker]:
        """Take the partitions of one worker away without telling it, whichever the dice say; none if none is left."""
        alive = self._alive()
        struck = [self._dice.choice(alive)] if alive else []
        for worker in struck:
            self._note(what)
            for member in worker.link.joined:
                await self._bus.expel(member)
        return struck

    async def _kill(self) -> None:
        """End a worker without a word, and start another one."""
        for worker in await self._expelled("kill"):
            worker.running.cancel()
        self._start_worker()

    async def _freeze(self) -> None:
        """Let a worker's partitions move while it works on, and end it later."""
        for worker in await self._expelled("freeze"):
            asyncio.get_running_loop().call_later(FROZEN_S, worker.running.cancel)
        self._start_worker()

    async def _restart_host(self) -> None:
        self._note("restart host")
        self._host.restart()

    async def _grow(self) -> None:
        """Rebalance with everybody alive."""
        if len(self._alive()) < MOST_WORKERS:
            self._note("grow")
            self._start_worker()

    async def _policy_away(self) -> None:
        self._note("policy away")
        first = self._policy.asked
        self._policy.away = range(first, first + 10)

    def _note(self, what: str) -> None:
        self._broken.append(f"{self._clock.monotonic():.3f} {what}")

    async def _digest(self) -> tuple[int, str]:
        digest, count = hashlib.sha256(), 0
        for topic in TABLE:
            for record in [] if topic in {EVENTS, METRICS} else await read_all(self._bus, topic):
                count += 1
                told = (*record.tp, record.offset, record.timestamp_ms, record.header("ce_subject"))
                digest.update(repr((*told, record.header("attempt"))).encode())
        return count, digest.hexdigest()


async def simulate(seed: int, renderer: Renderer) -> History:
    """Return what becomes of a run under this seed."""
    return await Simulation(seed, renderer).run()
