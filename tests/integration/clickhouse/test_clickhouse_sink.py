"""The sink puts every record into ClickHouse exactly once, whatever dies."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from infra.bus import Committed, TopicPartition
from infra.clickhouse import schema
from infra.clickhouse.client import Address, StoreError, connect
from infra.clickhouse.rows import DEAD, TABLES, TURNS
from infra.clickhouse.sink import Sink
from infra.clickhouse.streams import STREAMS
from infra.clock import SystemClock
from infra.dead_letter import DeadLetter
from infra.errors import ConfigError
from infra.kafka import KafkaBus, KafkaLimits
from infra.wire import Publisher
from schemas import topics
from schemas.messages import Trajectory
from schemas.outcome import Completed
from schemas.telemetry import EventKind, MetricPoint, Metrics, StageEvent, StageEvents
from schemas.topics import EVENTS, METRICS, TASKS, TRAJECTORIES
from tests.golden.samples import NOW_MS, SAMPLES, TASK
from tests.integration.clickhouse.helpers import rows_of, running_sink, until_stored
from tests.logs import read_all

pytestmark = pytest.mark.integration

POINTS = 20
"""Points in each Metrics record of these tests."""

COUNTS = (
    "SELECT count(), uniqExact(kafka_partition, kafka_offset, name), uniqExact(kafka_partition, kafka_offset)"
    " FROM metrics"
)


DEAD_1 = """
CREATE TABLE dead (
    source_topic LowCardinality(String),
    source_partition UInt32,
    source_offset UInt64,
    stage LowCardinality(String),
    cause String CODEC(ZSTD(1)),
    subject String,
    key String,
    value String CODEC(ZSTD(1)),
    headers Map(String, String),
    published_at DateTime64(3),
    kafka_topic LowCardinality(String),
    kafka_partition UInt32,
    kafka_offset UInt64
) ENGINE = MergeTree ORDER BY (source_topic, source_partition, source_offset)
SETTINGS non_replicated_deduplication_window = 10000
"""
"""The table `dead` as version 1 of the schema made it."""


async def publish_metrics(bus, count, *, run="r"):
    """Publish records of POINTS points each, spread over the partitions."""
    points = tuple(MetricPoint(name=f"m{n}", value=n, at_ms=NOW_MS + n) for n in range(POINTS))
    publisher = Publisher(bus, SystemClock(), "test")
    for number in range(count):
        await publisher.publish(METRICS, Metrics(run=run, service="s", points=points), partition=number % 4)


async def test_the_schema_is_applied_twice_without_harm(address):
    """The version is recorded once; the columns are the ones that the rows have."""
    await schema.apply(address)
    await schema.apply(address)
    assert await rows_of(address, "SELECT max(version), count() FROM schema_version") == [(schema.VERSION, 1)]
    for table in TABLES:
        where = "database = currentDatabase() AND table = {t:String}"
        sql = f"SELECT name, type FROM system.columns WHERE {where} ORDER BY position"
        assert list(table.columns.items()) == await rows_of(address, sql, t=table.name)


async def test_a_database_of_version_1_becomes_one_of_today(address):
    """Its letters say what they died of, as far as their headers do, its turns earned 0; twice changes nothing."""
    await schema.apply(address)
    await rows_of(address, "DROP TABLE dead SYNC")
    await rows_of(address, DEAD_1)
    await rows_of(address, "ALTER TABLE turns DROP COLUMN turn_reward")
    await rows_of(address, "INSERT INTO turns (run, turn) VALUES ('old', 3)")
    await rows_of(address, "TRUNCATE TABLE schema_version")
    await rows_of(address, "INSERT INTO schema_version (version) VALUES (1)")
    old = "INSERT INTO dead (stage, source_offset, headers) VALUES"
    await rows_of(address, f"{old} ('run', 1, map('x-kind', 'engine')), ('sink', 2, map())")
    for _ in range(2):
        await schema.apply(address)
    await rows_of(address, "INSERT INTO dead (stage, kind, source_offset) VALUES ('sink', 'conflict', 3)")
    found = await rows_of(address, "SELECT stage, kind FROM dead ORDER BY source_offset")
    versions = await rows_of(address, "SELECT version FROM schema_version ORDER BY version")
    turns = await rows_of(address, "SELECT turn, turn_reward FROM turns")
    which = "FROM system.columns WHERE database = currentDatabase() AND table = {t:String} ORDER BY position"
    columns = {
        table: [name for (name,) in await rows_of(address, f"SELECT name {which}", t=table.name)]
        for table in (DEAD, TURNS)
    }

    assert [("run", "engine"), ("sink", ""), ("sink", "conflict")] == found
    assert [(1,), (schema.VERSION,)] == versions
    assert [(3, 0.0)] == turns
    assert {DEAD: list(DEAD.columns), TURNS: list(TURNS.columns)} == columns


async def test_a_newer_schema_is_refused(address):
    """An old program must not write into what it does not know."""
    await schema.apply(address)
    await rows_of(address, "INSERT INTO schema_version (version) VALUES (999)")
    with pytest.raises(ConfigError, match="999"):
        await schema.apply(address)


async def test_every_topic_becomes_rows(bus, address):
    """One record of each kind, stored with its place in the log."""
    publisher = Publisher(bus, SystemClock(), "test")
    stored = {kind: stream.topic for stream in STREAMS if stream.rows for kind in stream.topic.carries}
    published = [message for message in SAMPLES.values() if type(message) in stored]
    for message in published:
        topic = stored[type(message)]
        await publisher.publish(topic, message, partition=0)
    await bus.publish("dead", b"\xff\x00", partition=1, headers=(("x-orig-topic", b"tasks"), ("x-cause", b"\xfe")))
    async with running_sink(bus, address):
        for topic in {*stored.values(), topics.DEAD}:
            await until_stored(bus, topic.name)
    for topic in set(stored.values()):
        found = await rows_of(address, f"SELECT uniqExact(kafka_offset) FROM {topic.name}")
        assert [(sum(stored[type(message)] is topic for message in published),)] == found, topic.name
    assert await rows_of(address, "SELECT source_topic, lower(hex(value)) FROM dead") == [("tasks", "ff00")]
    assert await rows_of(address, "SELECT count() > 0 FROM decision_samples WHERE place = 'trained'") == [(True,)]
    sums = "length(tokens), arraySum(mask), round(arraySum(logprobs), 4), turn_reward"
    sql = f"SELECT turn, {sums} FROM turns ORDER BY kafka_offset, turn LIMIT 2"
    assert await rows_of(address, sql) == [(0, 6, 3, -1.8125, 0.25), (1, 3, 2, -2.25, 0.0)]
    positions = dict(await rows_of(address, "SELECT topic, max(position) FROM positions GROUP BY topic"))
    assert {topic.name for topic in stored.values()} <= positions.keys()


async def test_the_first_record_of_a_sample_is_the_accepted_one(bus, address):
    """Later ones and records of another task under the same id do not count; the view rules as the arbiter does."""
    publisher = Publisher(bus, SystemClock(), "test")
    done = next(
        m for m in SAMPLES.values() if isinstance(m, Trajectory) and m.outcome.__class__.__name__ == "Completed"
    )
    other = msgspec.structs.replace(TASK, payload_digest="another", sample=4)
    for task in (TASK, other, TASK, msgspec.structs.replace(TASK, sample=4)):
        await publisher.publish(TRAJECTORIES, msgspec.structs.replace(done, task=task))
    async with running_sink(bus, address):
        await until_stored(bus, "trajectories")
    assert await rows_of(address, "SELECT sample, kafka_offset FROM accepted ORDER BY sample") == [(3, 0), (4, 3)]
    assert await rows_of(address, "SELECT sample, kafka_offset FROM conflicts") == [(4, 1)]


async def test_a_sample_that_failed_has_no_grade_to_average(bus, address):
    """A failure of the system is not a reward of 0, in a query either."""
    publisher = Publisher(bus, SystemClock(), "test")
    done = SAMPLES["rollmill.trajectory"]
    failed = SAMPLES["rollmill.trajectory.failed"]
    for sample, message in enumerate((done, failed, failed)):
        task = msgspec.structs.replace(TASK, sample=sample)
        await publisher.publish(TRAJECTORIES, msgspec.structs.replace(message, task=task))
    async with running_sink(bus, address):
        await until_stored(bus, "trajectories")
    averages = await rows_of(address, "SELECT avg(reward), avg(success), count() FROM accepted")
    assert averages == [(done.outcome.reward, done.outcome.success, 3)]


def outcome_of(task):
    """Return a terminal record of a task."""
    done = next(one for one in SAMPLES.values() if isinstance(one, Trajectory) and isinstance(one.outcome, Completed))
    return msgspec.structs.replace(done, task=task)


async def test_a_record_of_another_task_becomes_a_dead_letter(bus, address):
    """Once, also when its range is stored again; the names in it may be anything."""
    publisher = Publisher(bus, SystemClock(), "test")
    odd = msgspec.structs.replace(TASK, group='it\'s \\ \t ["odd"], é')
    for task in (TASK, odd):
        for digest, sample in ((task.payload_digest, 0), ("another", 1), ("another", 1)):
            changed = msgspec.structs.replace(task, payload_digest=digest, sample=sample)
            await publisher.publish(TRAJECTORIES, outcome_of(changed), partition=5)
    async with running_sink(bus, address) as first:
        await until_stored(bus, "trajectories")
    part = TopicPartition("trajectories", 5)
    member = await bus.join(["trajectories"], "sink")
    await member.commit({part: Committed(0, "rm1:5")})
    await member.close()
    later = msgspec.structs.replace(TASK, payload_digest="a third", sample=2)
    await publisher.publish(TRAJECTORIES, outcome_of(later), partition=5)
    async with running_sink(bus, address) as second:
        for topic in ("trajectories", "dead"):
            await until_stored(bus, topic)

    assert (4, 1) == (first.progress.buried, second.progress.buried)
    found = [DeadLetter(record, bus) for record in await read_all(bus, topics.DEAD)]
    assert [1, 2, 4, 5, 6] == [letter.original.offset for letter in found]
    assert {("conflict", "sink", part)} == {
        (letter.death.kind, letter.death.stage, letter.original.tp) for letter in found
    }
    assert outcome_of(later) == await found[-1].message()
    assert all(digest in found[-1].death.cause for digest in (TASK.payload_digest, "a third", "at offset 0"))
    kinds = "SELECT kind, count() FROM dead GROUP BY kind"
    assert [("conflict", 5)] == await rows_of(address, kinds)
    view = await rows_of(address, "SELECT kafka_offset FROM conflicts ORDER BY kafka_offset")
    assert [(1,), (2,), (4,), (5,), (6,)] == view


async def test_poison_goes_to_dead_and_the_stream_goes_on(bus, address):
    """Bytes that are no message, and a message whose number fits no column."""
    await publish_metrics(bus, 4)
    await bus.publish("metrics", b"\xc1 nonsense", partition=0)
    await bus.publish("tasks", b"\xc1 nonsense", partition=0)  # INIT buries this one
    publisher = Publisher(bus, SystemClock(), "test")
    event = StageEvent(
        run="r", group="g", sample=-1, attempt=0, stage="run", kind=EventKind.STARTED, at_ms=1_700_000_000_000
    )
    await publisher.publish(EVENTS, StageEvents(worker="w", events=(event,)))
    await publisher.publish(TASKS, msgspec.structs.replace(TASK, sample=-1))  # no task either: INIT buries it too
    await publish_metrics(bus, 4)
    async with running_sink(bus, address) as sink:
        for topic in ("metrics", "tasks", "events", "dead"):
            await until_stored(bus, topic)
    assert sink.progress.buried == 2
    assert await rows_of(address, COUNTS) == [(8 * POINTS, 8 * POINTS, 8)]
    found = await rows_of(address, "SELECT source_topic, kind, cause FROM dead ORDER BY source_topic")
    assert [row[:2] for row in found] == [("events", "not_stored"), ("metrics", "poison")]
    assert "-1" in found[0][2]
    assert "not msgpack" in found[1][2]


async def test_a_sink_that_dies_anywhere_is_succeeded_without_loss_or_doubles(bus, address):
    """Cancelled at random moments, over and over: the next one forms the same ranges again."""
    await schema.apply(address)
    dice = random.Random(7)
    for _ in range(15):
        await publish_metrics(bus, dice.randrange(1, 40))
        sink = Sink(bus, address, SystemClock(), max_range_rows=100)
        work = asyncio.create_task(sink.run())
        await asyncio.wait({work}, timeout=dice.uniform(0.0, 0.12))
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    async with running_sink(bus, address):
        await until_stored(bus, "metrics")
    records = sum((await bus.end_offsets("metrics")).values())
    assert [(records * POINTS, records * POINTS, records)] == await rows_of(address, COUNTS)


async def test_it_survives_its_own_death_on_a_real_kafka_too(kafka, address):
    """The intent travels in Kafka's commit metadata; sinks die at random and the last one finishes."""
    await schema.apply(address)
    limits = KafkaLimits(session_s=6.0, heartbeat_s=0.5)
    bus = KafkaBus(kafka, prefix="sinktest.", limits=limits)
    await bus.start()
    await bus.create_topics([METRICS, topics.DEAD])
    options = {"max_range_rows": 100, "streams": [stream for stream in STREAMS if stream.topic is METRICS]}
    dice = random.Random(3)
    for _ in range(4):
        await publish_metrics(bus, dice.randrange(20, 60))
        sink = Sink(bus, address, SystemClock(), **options)
        work = asyncio.create_task(sink.run())
        async with asyncio.timeout(60):
            while not sink.progress.records:
                await asyncio.sleep(0.01)
        await asyncio.wait({work}, timeout=dice.uniform(0.0, 0.1))
        work.cancel()
        await asyncio.wait({work})
    async with running_sink(bus, address, **options):
        await until_stored(bus, "metrics")
    records = sum((await bus.end_offsets("metrics")).values())
    await bus.close()
    assert await rows_of(address, COUNTS) == [(records * POINTS, records * POINTS, records)]


async def test_an_intent_left_behind_is_stored_under_its_own_range(bus, address):
    """The range was inserted, the commit was not: the successor inserts it again and it counts once."""
    await schema.apply(address)
    await publish_metrics(bus, 12)
    part = TopicPartition("metrics", 0)
    async with running_sink(bus, address):
        await until_stored(bus, "metrics")
    member = await bus.join(["metrics"], "sink")
    await member.commit({part: Committed(0, "rm1:2")})
    await member.close()
    await publish_metrics(bus, 12)
    async with running_sink(bus, address):
        await until_stored(bus, "metrics")
    assert await rows_of(address, COUNTS) == [(24 * POINTS, 24 * POINTS, 24)]


async def test_two_sinks_share_the_work(bus, address):
    """A second member joins and leaves while records come; each partition has one writer at a time."""
    options = {"max_range_rows": 60, "streams": [stream for stream in STREAMS if stream.topic is METRICS]}
    async with running_sink(bus, address, **options) as first:
        await publish_metrics(bus, 40)
        async with running_sink(bus, address, **options) as second:
            async with asyncio.timeout(20):
                while not len(first._buffers) == len(second._buffers) == 2:
                    await publish_metrics(bus, 4)
            await publish_metrics(bus, 200)
            await until_stored(bus, "metrics")
        await publish_metrics(bus, 40)
        await until_stored(bus, "metrics")
    records = sum((await bus.end_offsets("metrics")).values())
    assert second.progress.rows > 0
    assert await rows_of(address, COUNTS) == [(records * POINTS, records * POINTS, records)]


async def test_nothing_is_lost_while_clickhouse_is_away(bus, own_server):
    """Down at the start and killed in the middle: lag grows, then everything is there once."""
    address = Address.parse(own_server.url)
    own_server.kill()
    await publish_metrics(bus, 50)
    async with running_sink(bus, address, max_range_rows=200) as sink:
        async with asyncio.timeout(20):
            while not sink.progress.last_error:
                await asyncio.sleep(0.01)
        assert sink.progress.failing_since is not None
        assert await bus.committed("sink", "metrics") == {}
        own_server.start()
        for _ in range(3):
            await publish_metrics(bus, 300)
            own_server.kill()
            await publish_metrics(bus, 50)
            own_server.start()
        await until_stored(bus, "metrics")
        assert sink.progress.failing_since is None
    assert await rows_of(address, COUNTS) == [(1100 * POINTS, 1100 * POINTS, 1100)]


async def test_an_insert_again_after_kill_9_counts_once(own_server):
    """Killed in mid-insert, asked again under the same token: no row is missing and none is there twice."""
    address = Address.parse(own_server.url)
    await schema.apply(address)
    columns = {"run": "LowCardinality(String)", "kafka_offset": "UInt64"}
    survivors = 0
    for batch in range(6):
        data = [["r"] * 20_000, list(range(batch * 20_000, (batch + 1) * 20_000))]

        async def insert(data=data, batch=batch):
            client = await connect(address)
            try:
                await client.insert(
                    "metrics",
                    data,
                    column_names=list(columns),
                    column_type_names=list(columns.values()),
                    column_oriented=True,
                    settings={"async_insert": 0, "insert_deduplication_token": f"batch-{batch}"},
                )
            finally:
                await client.close()

        first = asyncio.create_task(insert())
        await asyncio.wait({first}, timeout=0.01 * batch)
        own_server.kill()
        survivors += (await asyncio.gather(first, return_exceptions=True)) == [None]
        own_server.start()
        await insert()
    assert survivors < 6
    assert await rows_of(address, "SELECT count(), uniqExact(kafka_offset) FROM metrics") == [(120_000, 120_000)]


async def test_a_refusal_that_waiting_does_not_mend_ends_the_sink(bus, address):
    """A missing table is named; the supervisor starts the sink again, which applies the schema."""
    sink = Sink(bus, address, SystemClock())
    work = asyncio.create_task(sink.run())
    await publish_metrics(bus, 1)
    await until_stored(bus, "metrics")
    await rows_of(address, "DROP TABLE metrics SYNC")
    await publish_metrics(bus, 1)
    with pytest.raises(StoreError, match="metrics"):
        await asyncio.wait_for(work, 20)
