"""The questions that the demo proposes can be asked as they are printed, and a fall of the reward can be traced."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.simulated import made_transcript
from infra.clickhouse import schema
from infra.clickhouse.client import connect
from infra.clock import SystemClock
from infra.wire import Publisher
from rollmill.demo.queries import CONSERVATION, QUESTIONS
from schemas.messages import Trajectory
from schemas.outcome import Completed
from schemas.telemetry import EventKind, StageEvent, StageEvents
from schemas.topics import EVENTS, TRAJECTORIES
from tests.integration.clickhouse.helpers import rows_of, running_sink, until_stored
from tests.logs import make_task

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("question", [CONSERVATION, *QUESTIONS], ids=lambda question: question.text)
async def test_a_proposed_question_has_an_answer(address, question):
    """Each query runs on the schema as it is."""
    await schema.apply(address)
    client = await connect(address)
    try:
        found = await client.query(question.of("some-run"))
    finally:
        await client.close()

    assert found.row_count >= 0  # nothing is stored: what counts is that ClickHouse understood the query


CAUSES = """
SELECT a.backend, e.worker, a.max_version AS version, count() AS samples, avg(a.success) AS success
FROM accepted AS a JOIN events AS e ON e.run = a.run AND e.`group` = a.`group` AND e.sample = a.sample
WHERE a.run = 'test' AND e.stage = 'run' AND e.kind = 'finished'
GROUP BY ALL ORDER BY success, a.backend
"""


async def test_a_falling_reward_leads_to_worker_engine_and_version_in_one_query(bus, address):
    """One engine went wrong at version 2: samples, outcomes and events share the ids by which they are joined."""
    publisher = Publisher(bus, SystemClock(), "test")
    for sample in range(16):
        engine, version = f"engine-{sample % 2}", 1 + sample // 8
        broken = (engine, version) == ("engine-1", 2)
        task, played = make_task(sample=sample, samples=16), made_transcript(16)
        spans = tuple(msgspec.structs.replace(span, version=version) for span in played.spans)
        outcome = Completed(components={}, reward=1.0 - broken, success=1.0 - broken, truncated=False)
        transcript = msgspec.structs.replace(played, spans=spans)
        made = Trajectory(task=task, outcome=outcome, transcript=transcript, verdict={}, backend=engine, stage="eval")
        await publisher.publish(TRAJECTORIES, made)
        event = StageEvent(
            run="test", group=task.group, sample=sample, attempt=0, stage="run", kind=EventKind.FINISHED, at_ms=1
        )
        await publisher.publish(EVENTS, StageEvents(worker=f"worker-{sample % 2}", events=(event,)), partition=0)
    async with running_sink(bus, address):
        await until_stored(bus, TRAJECTORIES.name)
        await until_stored(bus, EVENTS.name)

    rows = await rows_of(address, CAUSES)
    assert ("engine-1", "worker-1", 2, 4, 0.0) == rows[0]
    assert [1.0] * 3 == [success for *_, success in rows[1:]]
