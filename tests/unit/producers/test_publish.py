"""Groups -> tasks: the same source published twice is the same work."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest

from infra.control import ControlView
from infra.errors import BusError, ConfigError
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from producers.generated import GeneratedSource
from producers.publish import ensure_manifest, publish_source, require_free, tasks_of
from producers.source import Instance
from schemas.control import Cancel, Credit, RunManifest
from schemas.messages import Budgets, Trajectory
from schemas.outcome import Expired
from schemas.topics import CONTROL, TABLE, TASKS, TRAJECTORIES
from schemas.transcript import Sampling
from tests.logs import make_task, read_all

MANIFEST = RunManifest(run="r", seed=3, samples=2, budgets=Budgets(run_s=60), horizon=9, sampling=Sampling(top_k=5))
INSTANCE = Instance(visit=1, row=4, family="toy", payload={"a": 1})
CREDIT = Credit(run="r", epoch=0, admit_up_to=1, min_version=6, horizon=12, temperature=0.5)


async def tasks(bus):
    return [(await unpack(TASKS, record)).message for record in await read_all(bus, TASKS)]


def test_siblings_are_alike_but_for_their_number():
    """One instance, n samples: same group, seed, limits and payload."""
    first, second = tasks_of(MANIFEST, "s", INSTANCE, now_ms=1000)

    assert (0, 1, 2) == (first.sample, second.sample, first.samples)
    assert msgspec.structs.replace(second, sample=0) == first
    assert ("r", "s", 1, 4, {"a": 1}, "toy") == (
        first.run,
        first.source,
        first.visit,
        first.row,
        first.payload,
        first.family,
    )
    assert (86_401_000, Budgets(run_s=60), Sampling(top_k=5), 9, None, 0, None) == (
        first.start_by_ms,
        first.budgets,
        first.sampling,
        first.horizon,
        first.admission,
        first.min_version,
        first.weights_of,
    )


def test_the_trainers_stamps_come_with_the_credit():
    """Horizon, temperature and lowest version are those at admission; the rest is the manifest's."""
    (task, _) = tasks_of(MANIFEST, "s", INSTANCE, now_ms=0, admission=7, credit=CREDIT)

    assert (7, 12, 6, "r", Sampling(top_k=5, temperature=0.5)) == (
        task.admission,
        task.horizon,
        task.min_version,
        task.weights_of,
        task.sampling,
    )


def test_an_instance_may_bring_its_own_horizon():
    """It comes before the trainer's and the manifest's."""
    own = Instance(visit=0, row=0, family="toy", payload={}, horizon=3)

    assert {3} == {
        task.horizon for credit in (None, CREDIT) for task in tasks_of(MANIFEST, "s", own, now_ms=0, credit=credit)
    }


@pytest.mark.parametrize(
    ("run", "source", "instance"),
    [
        ("other", "s", INSTANCE),
        ("r", "other", INSTANCE),
        ("r", "s", Instance(2, 4, "toy", {"a": 1})),
        ("r", "s", Instance(1, 5, "toy", {"a": 1})),
        ("r", "s", Instance(1, 4, "toy", {"a": 2})),
    ],
)
def test_another_place_or_payload_is_another_group(run, source, instance):
    """Run, source, visit, row and payload make the id."""
    manifest = msgspec.structs.replace(MANIFEST, run=run)

    (mine, _), (other, _) = (
        tasks_of(MANIFEST, "s", INSTANCE, now_ms=0),
        tasks_of(manifest, source, instance, now_ms=0),
    )

    assert mine.group != other.group


async def test_publishing_a_source_twice_asks_for_the_same_samples(bus, clock):
    """Ids and seeds are derived, so the second time changes nothing: its outcomes are superseded."""
    source = GeneratedSource("toy", {}, count=5)
    assert await publish_source(bus, clock, source, MANIFEST) == 10
    await clock.advance(60)
    assert await publish_source(bus, clock, source, MANIFEST) == 10
    found = await tasks(bus)

    assert (20, 10) == (len(found), len({task.id for task in found}))
    assert len({(task.id, task.seed, task.payload_digest) for task in found}) == 10
    assert len(await read_all(bus, CONTROL)) == 1


async def test_the_first_publisher_writes_the_manifest_with_the_place_where_the_run_begins(bus, clock):
    """Replay starts at the end that the run's partition had then."""
    publisher = Publisher(bus, clock, "test")
    for _ in range(3):
        earlier = Trajectory(task=make_task(run="r"), outcome=Expired(cause="old"), stage="reaper")
        await publisher.publish(TRAJECTORIES, earlier)
    written = await ensure_manifest(bus, clock, publisher, MANIFEST)
    known = await ensure_manifest(bus, clock, publisher, msgspec.structs.replace(MANIFEST, extra={"note": "again"}))

    assert msgspec.structs.replace(MANIFEST, created_ms=clock.now_ms(), trajectories_start=3) == written == known


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("seed", 4, "seed is 3, here 4"),
        ("samples", 8, "samples is 2, here 8"),
        ("horizon", 1, "horizon is 9, here 1"),
        ("sampling", Sampling(top_p=0.5), "sampling.top_p is 1.0, here 0.5; sampling.top_k is 5, here 0"),
        ("budgets", Budgets(run_s=61), "budgets.run_s is 60.0, here 61"),
    ],
)
async def test_a_publisher_with_another_manifest_is_refused(bus, clock, field, value, said):
    """Siblings of one run must be alike: the error says what differs and what to do, and nothing is published."""
    source = GeneratedSource("toy", {}, count=1)
    await publish_source(bus, clock, source, MANIFEST)
    with pytest.raises(ConfigError) as refused:
        await publish_source(bus, clock, source, msgspec.structs.replace(MANIFEST, **{field: value}))

    assert (
        "run 'r' exists with another configuration, which all its samples share: "
        f"{said}. Use the same values, or a new run name"
    ) == str(refused.value)
    assert len(await tasks(bus)) == 2


async def test_whether_a_manifest_would_be_refused_can_be_asked_without_writing_one(bus, clock):
    """A trainer asks before it loads a model, and writes when nothing is left that refuses to start."""
    await require_free(bus, clock, MANIFEST)
    assert await bus.end_offsets(CONTROL.name) == {0: 0}
    await ensure_manifest(bus, clock, Publisher(bus, clock, "test"), MANIFEST)

    await require_free(bus, clock, MANIFEST)
    with pytest.raises(ConfigError, match="seed is 3, here 4"):
        await require_free(bus, clock, msgspec.structs.replace(MANIFEST, seed=4))
    with pytest.raises(ConfigError, match=r"'\.\.' is no name for a run"):
        await require_free(bus, clock, msgspec.structs.replace(MANIFEST, run=".."))


async def test_a_run_that_a_trainer_paces_takes_no_tasks_from_a_publisher(bus, clock):
    """They would come on top of the credit; the error names the way in."""
    await ensure_manifest(bus, clock, Publisher(bus, clock, "trainer"), msgspec.structs.replace(MANIFEST, paced=True))
    with pytest.raises(ConfigError, match=r"paced is True, here False.*takes tasks from `rollmill feeder` alone"):
        await publish_source(bus, clock, GeneratedSource("toy", {}, count=1), MANIFEST)

    assert [] == await tasks(bus)


async def test_what_a_trainer_stamps_on_each_group_may_change_in_a_paced_run(bus, clock):
    """A resumed run has another horizon and temperature; everything else is still shared."""
    publisher = Publisher(bus, clock, "trainer")
    paced = msgspec.structs.replace(MANIFEST, paced=True)
    written = await ensure_manifest(bus, clock, publisher, paced)
    other = msgspec.structs.replace(paced, horizon=30, sampling=Sampling(top_k=5, temperature=0.25))

    assert await ensure_manifest(bus, clock, publisher, other) == written
    with pytest.raises(ConfigError, match="seed is 3, here 9"):
        await ensure_manifest(bus, clock, publisher, msgspec.structs.replace(other, seed=9))


class Racing(MemoryBus):
    """A log on which two write their manifests at the same moment: each has read that there is none."""

    def __init__(self, clock):
        super().__init__(clock)
        self.met = asyncio.Barrier(2)
        self.left = 2

    async def publish(self, topic, value, **where):
        if topic == CONTROL.name and self.left:
            self.left -= 1
            await self.met.wait()
        return await super().publish(topic, value, **where)


@pytest.fixture
async def race(clock):
    """That log, with all topics."""
    bus = Racing(clock)
    await bus.create_topics(TABLE)
    return bus


async def compacted(bus, clock):
    """Return a log that holds only the last control record of each key, as compaction leaves it."""
    left = MemoryBus(clock)
    await left.create_topics(TABLE)
    for record in {record.key: record for record in await read_all(bus, CONTROL)}.values():
        await left.publish(CONTROL.name, record.value, key=record.key, partition=0)
    return left


async def manifest(bus, clock):
    """Return the manifest that a reader who comes now sees."""
    view = ControlView(bus, clock)
    await view.start()
    await view.close()
    return view.get("run/r", RunManifest)


async def test_of_two_manifests_at_once_the_first_counts_for_everybody(race, clock):
    """The other publisher is refused as if it had come later, and compaction keeps the one that counts."""
    wanted = [MANIFEST, msgspec.structs.replace(MANIFEST, samples=8)]
    publisher = Publisher(race, clock, "test")
    found = await asyncio.gather(
        *(ensure_manifest(race, clock, publisher, one) for one in wanted), return_exceptions=True
    )
    (won,) = [one for one in found if isinstance(one, RunManifest)]
    (refused,) = [one for one in found if isinstance(one, ConfigError)]

    assert "samples is" in str(refused)
    assert won == await manifest(race, clock) == await manifest(await compacted(race, clock), clock)


async def test_two_equal_manifests_at_once_are_one(race, clock):
    """Both publishers go on with the same beginning of the run, whatever each had noted."""
    wanted = [msgspec.structs.replace(MANIFEST, extra={"by": name}) for name in ("one", "other")]
    publisher = Publisher(race, clock, "test")
    one, other = await asyncio.gather(*(ensure_manifest(race, clock, publisher, each) for each in wanted))

    assert one == other == await manifest(race, clock) == await manifest(await compacted(race, clock), clock)


async def test_whoever_finds_another_manifest_last_in_the_log_mends_it(bus, clock):
    """The one that wrote it may have died before it could."""
    publisher = Publisher(bus, clock, "test")
    first = await ensure_manifest(bus, clock, publisher, MANIFEST)
    await publisher.publish(CONTROL, msgspec.structs.replace(MANIFEST, samples=8))
    again = await ensure_manifest(bus, clock, publisher, MANIFEST)

    assert first == again == await manifest(await compacted(bus, clock), clock)
    assert 3 == len(await read_all(bus, CONTROL))


async def test_nothing_is_published_to_a_cancelled_run(bus, clock):
    """Its tasks would all end as cancelled: the publisher is told at once."""
    await Publisher(bus, clock, "test").publish(CONTROL, Cancel(target="r", cause="wrong reward"))

    with pytest.raises(ConfigError, match=r"run 'r' is cancelled \(wrong reward\).*use a new run name"):
        await publish_source(bus, clock, GeneratedSource("toy", {}, count=2), MANIFEST)
    assert [] == await tasks(bus)


async def test_another_run_may_have_another_manifest(bus, clock):
    """Manifests are by run."""
    source = GeneratedSource("toy", {}, count=1)
    await publish_source(bus, clock, source, MANIFEST)
    await publish_source(bus, clock, source, msgspec.structs.replace(MANIFEST, run="s", seed=4))

    assert {"r", "s"} == {task.run for task in await tasks(bus)}


async def test_a_log_that_refuses_is_the_publishers_error(clock):
    """Whoever publishes learns that not everything is durable."""

    class Full(MemoryBus):
        async def publish(self, topic, value, **where):
            if topic == TASKS.name and self.left == 0:
                raise BusError("the disk is full")
            self.left -= topic == TASKS.name
            return await super().publish(topic, value, **where)

    bus = Full(clock)
    bus.left = 3
    await bus.create_topics(TABLE)

    with pytest.raises(BusError, match="disk is full"):
        await publish_source(bus, clock, GeneratedSource("toy", {}, count=5), MANIFEST)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"horizon": 99_999_999_999_999}, "horizon is 99999999999999"),
        ({"sampling": Sampling(temperature=math.inf)}, "sampling.temperature is inf"),
        ({"sampling": Sampling(temperature=math.nan)}, "sampling.temperature is nan"),
        ({"max_sampled_tokens": -1}, "max_sampled_tokens is -1"),
        ({"start_within_s": math.nan}, "start_within_s is nan"),
    ],
)
async def test_what_no_stage_would_run_is_refused_before_anything_is_written(bus, clock, changes, says):
    """The manifest stands for good, so it is not written either: the name can be used with better values."""
    source = GeneratedSource("toy", {}, count=2)
    with pytest.raises(ConfigError, match=says):
        await publish_source(bus, clock, source, msgspec.structs.replace(MANIFEST, **changes))

    assert ([], []) == (await read_all(bus, CONTROL), await read_all(bus, TASKS))
    assert await publish_source(bus, clock, source, MANIFEST) == 4


@pytest.mark.parametrize(
    ("instance", "says"),
    [
        (Instance(0, 3, "toy", {}, horizon=0), "horizon is 0"),
        (Instance(0, 3, "toy", {}, horizon=-1), "horizon is -1"),
        (Instance(0, 3, "toy", {1: 2}), "map keys must be text"),
        (Instance(0, 3, "toy", {"n": 2**64}), "no form on the wire"),
        (Instance(0, -1, "toy", {}), "row is -1"),
    ],
)
def test_an_instance_that_no_stage_would_run_is_named_by_its_place(instance, says):
    """A source of one's own is judged like a file, and none of the group's siblings is published."""
    with pytest.raises(ConfigError, match=f"visit 0, row {instance.row} of 's'.*{says}"):
        tasks_of(MANIFEST, "s", instance, now_ms=0)


@pytest.mark.parametrize("credit", [{"temperature": math.nan}, {"horizon": 0}])
def test_a_stamp_that_no_stage_would_run_is_refused(credit):
    """What comes with the credit is judged as what the manifest says."""
    with pytest.raises(ConfigError, match=next(iter(credit))):
        tasks_of(MANIFEST, "s", INSTANCE, now_ms=0, credit=msgspec.structs.replace(CREDIT, **credit))
