"""Every query of the documentation can be asked as it is printed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from benchmarks.simulated import made_transcript
from infra.clickhouse import schema
from infra.clickhouse.client import Address
from infra.clock import SystemClock
from infra.memory import MemoryBus
from infra.wire import Publisher
from schemas.messages import Trajectory
from schemas.outcome import Boundary, Completed, Failed, FailureKind, StopReason
from schemas.telemetry import EventKind, MetricPoint, Metrics, StageEvent, StageEvents
from schemas.topics import EVENTS, METRICS, TABLE, TASKS, TRAJECTORIES
from tests.integration.clickhouse.helpers import rows_of, running_sink, until_stored
from tests.logs import make_task

pytestmark = pytest.mark.integration

DOCS = Path(__file__).parents[3] / "docs"
SQL = re.compile(r"^```sql\n(.*?)^```", re.DOTALL | re.MULTILINE)
QUERIES = [
    pytest.param(query, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, query in enumerate(SQL.findall(page.read_text(encoding="utf-8")))
]


@pytest.fixture(scope="module")
def tables(server):
    """A database with the tables as they are, the same for all queries."""
    address = Address.parse(server.url, database="tables")
    asyncio.run(schema.apply(address))
    return address


@pytest.fixture(scope="module")
def documented(server):
    """A database with a run called `my-run`."""
    address = Address.parse(server.url, database="documented")
    asyncio.run(store_a_run(address))
    return address


async def store_a_run(address):
    """Of three siblings one succeeded, one failed, one is on its way; of four groups of a step one was kept."""
    bus = MemoryBus()
    await bus.create_topics(TABLE)
    publisher = Publisher(bus, SystemClock(), "test")
    tasks = [make_task(run="my-run", sample=sample, samples=3) for sample in range(3)]
    for task in tasks:
        await publisher.publish(TASKS, task)
    done = Completed(components={"found": 0.5}, reward=0.5, success=1.0, truncated=True, turn_rewards=(0.25,))
    failed = Failed(kind=FailureKind.ENGINE, boundary=Boundary.POLICY, cause="no answer")
    played = Trajectory(
        task=tasks[0], outcome=done, transcript=made_transcript(16), verdict={}, stop=StopReason.TURNS, stage="eval"
    )
    await publisher.publish(TRAJECTORIES, played)
    await publisher.publish(TRAJECTORIES, Trajectory(task=tasks[1], outcome=failed, stage="run"))
    points = (
        MetricPoint(name="trainer.groups_kept", value=1.0, at_ms=1, step=1),
        MetricPoint(name="trainer.groups_dropped", value=3.0, at_ms=1, step=1, labels={"reason": "filtered"}),
        MetricPoint(name="trainer.groups_dropped", value=5.0, at_ms=1, step=1, labels={"reason": "incomplete"}),
    )
    await publisher.publish(METRICS, Metrics(run="my-run", service="trainer", points=points))
    shared = {"run": "my-run", "group": "g0", "sample": 0, "attempt": 0, "stage": "run", "at_ms": 1}
    events = (
        StageEvent(**shared, kind=EventKind.STARTED, waited_ms=2000),
        StageEvent(**shared, kind=EventKind.FINISHED, took_ms=5000),
    )
    await publisher.publish(EVENTS, StageEvents(worker="run-0", events=events), partition=0)
    async with running_sink(bus, address):
        for topic in (TASKS, TRAJECTORIES, METRICS, EVENTS):
            await until_stored(bus, topic.name)


def test_there_are_queries():
    """A page whose fences were changed would otherwise pass."""
    assert len(QUERIES) > 15


@pytest.mark.parametrize("query", QUERIES)
async def test_a_query_of_the_docs_has_an_answer(tables, query):
    """As it is printed; nothing is stored: what counts is that ClickHouse understood it."""
    assert len(await rows_of(tables, query)) >= 0


def query_of(page, mark):
    """Return the query of a page that holds a piece of text."""
    (found,) = [query for query in SQL.findall((DOCS / page).read_text(encoding="utf-8")) if mark in query]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "mark", "rows"),
    [
        ("tuning.md", "AS kept_share", [(1, 1.0, 3.0, 0.25)]),
        ("tuning.md", "AS valid_share", [(1.0, 16.0, 8.0)]),
        ("troubleshooting.md", "failure_kind, boundary, count", [("failed", "engine", "policy", 1, "no answer")]),
        ("troubleshooting.md", "AS component", [(0, "found", 0.5, 1.0)]),
        ("troubleshooting.md", "SELECT stop", [("turns", 1, 1.0, 8.0, 1.0)]),
        ("troubleshooting.md", "any(t.horizon)", [(0, 16, 1.0, 1.0)]),
        ("troubleshooting.md", "AS median_queue_s", [("run", 2.0, 5.0, 5.0, 1)]),
        ("troubleshooting.md", "AS per_episode", [("go", 1, 1, 1.0, 0.25)]),
    ],
)
async def test_the_answers_say_what_the_pages_say_they_do(documented, page, mark, rows):
    """On a run small enough to know what they are."""
    assert await rows_of(documented, query_of(page, mark)) == rows


@pytest.mark.slow
async def test_a_sample_on_its_way_is_named(documented):
    """Those that have ended, well or not, are not."""
    found = await rows_of(documented, query_of("troubleshooting.md", "AS since"))

    assert [sample for _, sample, *_ in found] == [2]
