"""kill -9 of the sink and of ClickHouse while a run is written: every record is stored once, and the books agree."""

from __future__ import annotations

import asyncio

import pytest

from infra.clickhouse.check import check
from infra.clickhouse.client import connect
from infra.clock import SystemClock
from infra.config import Config
from infra.connect import connected
from infra.wire import Publisher
from producers.publish import publish_tasks
from rollmill import store
from rollmill.ledger import ledger
from rollmill.services import local_services, make_plan
from rollmill.supervisor import Supervisor
from schemas.topics import TASKS, TRAJECTORIES
from tests.chaos.kill_plan import carry_out, draw, show
from tests.chaos.system import ROOT
from tests.pipeline.synthetic_run import RUN, SAMPLES, failure, task, trajectory

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CLOCK = SystemClock()

WINDOW_S = 20.0
"""So long records come and things are killed."""

GROUPS = 60
BEHIND_S = 120.0
"""Longest wait for the last sink to store the rest."""


async def write_run(bus) -> None:
    """Publish tasks and outcomes, some of them twice, over the whole window."""
    publisher = Publisher(bus, CLOCK, "test")
    for number in range(GROUPS):
        tasks = [task(number, sample) for sample in range(SAMPLES)]
        await publish_tasks(publisher, tasks)
        for one in tasks:
            made = failure(one) if (number + one.sample) % 7 == 0 else trajectory(one, float(number % 2))
            await publisher.publish(TRAJECTORIES, made)
            if number % 5 == 0:
                await publisher.publish(TRAJECTORIES, trajectory(one, 1.0, seed=1))
        await asyncio.sleep(WINDOW_S / GROUPS)


async def stored(address) -> dict[str, int]:
    """Return how many rows each table has."""
    client = await connect(address)
    try:
        return {
            table: (await client.query(f"SELECT count() FROM {table} WHERE run = '{RUN}'")).result_rows[0][0]
            for table in (TASKS.name, TRAJECTORIES.name)
        }
    finally:
        await client.close()


@pytest.mark.parametrize("seed", [1])
async def test_a_sink_and_a_clickhouse_that_are_killed_store_every_record_once(kafka, tmp_path, seed):
    """The rows are as many as the records, and SQL places every sample as the log itself does."""
    kills = draw(seed, {"sink": 1, "clickhouse": 1}, late=(), again=("sink",), more=2, window_s=WINDOW_S)
    show(f"seed {seed}, logs in {tmp_path}", *kills)
    bus = Config().bus.model_copy(update={"session_timeout_s": 6.0, "prefix": f"chaos-sink-{seed}."})
    base = Config().model_copy(update={"bus": bus})
    plan = make_plan(tmp_path / "data", base=base, bootstrap=kafka, policy_url="http://127.0.0.1:1")
    services = [one for one in local_services(plan) if one.name in {"topics", "clickhouse", "sink"}]
    async with Supervisor(services, run_dir=plan.run_dir, on_event=show, cwd=ROOT) as supervisor:
        plan.write()
        await supervisor.start()
        async with connected(plan.config.bus, client="test") as log:
            await asyncio.gather(write_run(log), carry_out(kills, supervisor))
            address = store.address(plan.config)
            report = await check(log, address, CLOCK, RUN, wait_s=BEHIND_S)
            books = await ledger(log, CLOCK, RUN)
            written = {topic.name: sum((await log.end_offsets(topic.name)).values()) for topic in (TASKS, TRAJECTORIES)}
            rows = await stored(address)

    assert report.conserved, report
    assert (books.counts(), GROUPS * SAMPLES) == (report.counts, report.admitted)
    assert written == rows
