"""Everything twice, or late: through the whole path each sample has one outcome and each group is handed out once."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager

import msgspec
import pytest

from infra.trajectories import TrajectoryReader
from infra.wire import Publisher
from producers.generated import GeneratedSource
from producers.publish import ensure_manifest, publish_source, publish_tasks, tasks_of
from rollmill.ledger import ledger
from schemas.control import RunManifest
from schemas.topics import EPISODES, INIT_RETRY_5S, ROLLOUTS, TASKS, TRAJECTORIES
from stages.handlers.keydoor import WORDS
from stages.run.render import Renderer
from tests.logs import read_all, wait_until
from tests.model_directory import word_model
from tests.pipeline.at_work import pipeline_at_work

GROUPS, SAMPLES = 4, 2
SOURCE = GeneratedSource("keydoor", {"size": 4}, count=GROUPS)
MANIFEST = RunManifest(run="r", seed=5, samples=SAMPLES)
READ_BY = {TASKS: "init", INIT_RETRY_5S: "init", EPISODES: "run", ROLLOUTS: "eval"}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(word_model(tmp_path_factory.mktemp("model"), WORDS))


class World:
    """A log on which a pipeline works."""

    def __init__(self, clock, bus):
        self.clock, self.bus = clock, bus

    async def publish(self):
        """Publish the source."""
        await publish_source(self.bus, self.clock, SOURCE, MANIFEST)

    async def tasks(self):
        """Return the tasks of the source."""
        manifest = await ensure_manifest(self.bus, self.clock, Publisher(self.bus, self.clock, "test"), MANIFEST)
        now_ms = self.clock.now_ms()
        return [task for row in SOURCE.instances() for task in tasks_of(manifest, SOURCE.name, row, now_ms=now_ms)]

    async def deliver_again(self, *topics):
        """Append every record of some topics once more, as it is."""
        for topic in topics:
            for record in await read_all(self.bus, topic):
                where = {"key": record.key, "partition": record.partition, "headers": record.headers}
                await self.bus.publish(topic.name, record.value, **where)

    async def quiet(self):
        """Wait until no stage has anything left to do."""

        async def nothing_left():
            return all([await self._done(topic, stage) for topic, stage in READ_BY.items()])

        await wait_until(nothing_left, True)

    async def _done(self, topic, stage):
        ends, known = await self.bus.end_offsets(topic.name), await self.bus.committed(stage, topic.name)
        # A partition that nobody has committed anything in yet is not done either.
        return all(part in known and known[part].offset == end for part, end in ends.items() if end)

    async def groups(self):
        """Return what a reader of the run is given now, and how much it ignored."""
        async with TrajectoryReader.on(self.bus, self.clock, "r") as reader:
            groups = [group async for group in reader.groups(follow=False)]
            assert GROUPS == len({group.id for group in groups}) == len(groups)
            assert {SAMPLES} == {len(group.graded) for group in groups}
            return groups, reader.superseded

    async def terminal_records(self):
        """Return how many terminal records there are."""
        return len(await read_all(self.bus, TRAJECTORIES))

    async def books(self):
        """Return samples by disposition; there must be no violation."""
        found = await ledger(self.bus, self.clock, "r")
        assert [] == found.violations
        return found.counts()


@asynccontextmanager
async def world_at_work(renderer):
    async with pipeline_at_work(renderer) as (clock, bus):
        yield World(clock, bus)


async def test_a_source_that_is_published_twice_is_rolled_out_as_one(renderer):
    """Before the first outcomes and after them: the same groups with the same outcomes, the rest superseded."""
    async with world_at_work(renderer) as world:
        await world.publish()
        await world.publish()
        await world.quiet()
        first, _ = await world.groups()
        await world.publish()
        await world.quiet()
        then, superseded = await world.groups()

        assert first == then
        assert superseded == await world.terminal_records() - GROUPS * SAMPLES
        assert {"unread": GROUPS * SAMPLES} == await world.books()


@pytest.mark.parametrize("topic", [TASKS, EPISODES, ROLLOUTS, TRAJECTORIES], ids=str)
async def test_records_that_are_delivered_again_change_no_outcome(renderer, topic):
    """At each hop, after everything had ended: a worker that died before its commit, or a client that sent twice."""
    async with world_at_work(renderer) as world:
        await world.publish()
        await world.quiet()
        first, none = await world.groups()
        await world.deliver_again(topic)
        await world.quiet()
        then, superseded = await world.groups()

        assert (first, 0) == (then, none)
        assert superseded == await world.terminal_records() - GROUPS * SAMPLES
        assert {"unread": GROUPS * SAMPLES} == await world.books()


async def test_a_first_attempt_that_comes_late_is_superseded_by_the_second(renderer):
    """The one that ends first counts, at whatever attempt: nobody waits for the other, and nobody counts it."""
    async with world_at_work(renderer) as world:
        publisher = Publisher(world.bus, world.clock, "test")
        tasks = await world.tasks()
        for task in tasks:
            await publisher.publish(INIT_RETRY_5S, msgspec.structs.replace(task, attempt=1))
        await wait_until(world.terminal_records, len(tasks))
        await publish_tasks(publisher, tasks)
        await world.quiet()
        groups, superseded = await world.groups()

        assert Counter({1: len(tasks)}) == Counter(one.task.attempt for group in groups for one in group.samples)
        assert superseded == len(tasks) == await world.terminal_records() - len(tasks)
        assert {"unread": len(tasks)} == await world.books()
