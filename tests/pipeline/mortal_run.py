"""A whole run on a log in memory, of three parts that may die and start again: feeder, stages, trainer.

The stand-in for the stages is the worst of them: it remembers nothing, so it does all of its work again.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

from mortal import Fate, MortalBus, mortal
from synthetic_run import RUN, SAMPLES, Killed, failure, trajectory

from infra.bus import Record, TopicPartition
from infra.clock import SystemClock
from infra.control import ControlView
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from producers.feeder import Feeder
from producers.generated import GeneratedSource
from producers.publish import ensure_manifest
from schemas.control import Credit, PolicyVersion, RunManifest
from schemas.topics import TABLE, TASKS, TRAJECTORIES
from trainer import loop

CLOCK = SystemClock()
PARTS = ("feeder", "stages", "trainer")
LIMIT_S = 100.0
"""Longest wait for a run of a few small steps, seconds."""


class Chronicle(MemoryBus):
    """A log that knows in which order its records came, over all topics."""

    def __init__(self, clock):
        super().__init__(clock)
        self.told = []

    async def publish(self, topic, value, **options):
        """Append a record, and note it."""
        at = await super().publish(topic, value, **options)
        given = options.get("key"), value, tuple(options.get("headers", ()))
        self.told.append(Record(topic, at.partition, at.offset, self.clock.now_ms(), *given))
        return at


def sound(task):
    """Every sample ends well, and siblings differ."""
    return float(task.sample == task.row % SAMPLES)


class MortalRun:
    """A source of so many rows and the three parts; each part has a fate, and a second life."""

    def __init__(self, config, *, rows, success=sound, fates=None):
        """Set up; `success` says how a task ends, with none for a failure."""
        self.bus = Chronicle(CLOCK)
        self.fates = {part: (fates or {}).get(part, Fate()) for part in PARTS}
        self.died = set()
        self.config = config
        self._source = GeneratedSource("keydoor", {"size": 4}, count=rows)
        self._success = success

    async def run(self):
        """Train until the run ends."""
        await self.bus.create_topics(TABLE)
        manifest = RunManifest(run=RUN, seed=5, samples=SAMPLES, paced=True)
        await ensure_manifest(self.bus, CLOCK, Publisher(self.bus, CLOCK, "test"), manifest)
        async with self._working(self._alive("feeder"), self._alive("stages")):
            with mortal(self.fates["trainer"]):
                await self._alive("trainer")
        return self

    async def go_back(self, step, config):
        """Go on from an earlier step by another configuration; nobody dies any more."""
        async with self._working(self._fed_again(), self._stages(self.bus, again=True)):
            await loop.run(config, self.bus, CLOCK, rollback=step)

    @asynccontextmanager
    async def _working(self, *works):
        """Keep parts at work while the block runs, which has a limit."""
        tasks = [asyncio.create_task(work) for work in works]
        try:
            async with asyncio.timeout(LIMIT_S):
                yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fed_again(self):
        """Start a feeder once the new trainer gives credit: the last one closed the run."""
        control = ControlView(self.bus, CLOCK)
        async with control.following():
            while control.get(f"credit/{RUN}", Credit).closed:
                await control.changed(1.0)
        await self._feeder(self.bus, again=True)

    async def _alive(self, part):
        """Start a part, and once more when it has died."""
        live = getattr(self, f"_{part}")
        try:
            return await live(MortalBus(self.bus, self.fates[part]), again=False)
        except Killed:
            self.died.add(part)
            self.fates[part].dead = False  # for its files: its bus is another one
            return await live(self.bus, again=True)

    async def _feeder(self, bus, *, again):
        await Feeder(bus, CLOCK, RUN, self._source).run()

    async def _trainer(self, bus, *, again):
        await loop.run(self.config, bus, CLOCK, resume=again)

    async def _stages(self, bus, *, again):
        """End every task of the log, from its first one on, by the weights of the moment."""
        publisher, control, draw = Publisher(bus, CLOCK, "eval"), ControlView(bus, CLOCK), random.Random(0)
        async with control.following():
            reader = await bus.read({TopicPartition(TASKS.name, part): 0 for part in range(TASKS.partitions)})
            try:
                while True:
                    records = list(await reader.poll(100, 0.05))
                    draw.shuffle(records)  # siblings do not end one after the other
                    for record in records:
                        task = (await unpack(TASKS, record)).message
                        await publisher.publish(TRAJECTORIES, await self._end(task, control))
            finally:
                await reader.close()

    async def _end(self, task, control):
        """Return how a task ends, once there are weights that may sample it: RUN waits for them too."""
        while (known := control.get(f"policy/{RUN}", PolicyVersion)) is None or known.version < task.min_version:
            await control.changed(1.0)
        success = self._success(task)
        return failure(task) if success is None else trajectory(task, success, version=known.version)
