import asyncio

import pytest

from benchmarks.pipeline import LONGEST_S, Pipeline, no_op_payloads, waits
from benchmarks.simulated import FAMILY, Simulated, made_transcript
from benchmarks.work import collect, ends, make_tasks, publish
from infra.clock import SystemClock, VirtualClock, settle
from infra.errors import WaitTimeout
from infra.memory import MemoryBus
from infra.stage import Member
from infra.worker import Limits
from schemas import transcript
from schemas.topics import TABLE, TASKS, TRAJECTORIES
from stages.wiring import eval_stage, init_stage, run_stage


@pytest.fixture
async def pipeline():
    """The memory bus with the three simulated stages on it, RUN with four slots."""
    bus, clock = MemoryBus(SystemClock()), SystemClock()
    await bus.create_topics(TABLE)
    simulated = Simulated(clock, "w")
    members = [
        Member(init_stage(simulated.init), bus, clock, worker="init", first=True),
        Member(run_stage(simulated.run), bus, clock, worker="run", limits=Limits(max_in_flight=4)),
        Member(eval_stage(simulated.eval), bus, clock, worker="eval"),
    ]
    running = [asyncio.create_task(member.run()) for member in members]
    yield Pipeline(bus, slots=4)
    for member in members:
        member.stop()
    await asyncio.gather(*running)


async def test_jobs_that_do_nothing_come_through_all_stages(pipeline):
    """Each is a real trajectory at the end, and the figure counts all of them."""
    assert await pipeline.no_ops("r", 20) > 0

    begin = dict.fromkeys(await ends(pipeline.bus, TRAJECTORIES), 0)
    tasks = make_tasks("r", no_op_payloads(20), family=FAMILY)
    assert len(await collect(pipeline.bus, TRAJECTORIES, begin, tasks, limit_s=5)) == 20


async def test_the_slots_of_run_are_counted_from_the_log(pipeline):
    """Slots with a backlog are busy, and never more of them than there are; how busy is the machine's affair."""
    short = [payload | {"run_s": payload["run_s"] / 50, "init_s": 0.0, "eval_s": 0.0} for payload in waits(1, 60)]

    busy = await pipeline.skewed("r", short)

    assert 0.0 < busy <= 4.0
    assert len(pipeline.windows) == 1


async def test_a_stage_waits_as_long_as_its_task_says():
    """The work of a job is in its payload, so that both sides and all rounds do the same."""
    clock = VirtualClock()
    (task,) = make_tasks("r", [{"init_s": 3.0, "run_s": 0.0, "eval_s": 0.0, "tokens": 10}], family=FAMILY)
    working = asyncio.create_task(Simulated(clock, "w").init(task))
    await settle()
    await clock.advance(2.9)
    early = working.done()
    await clock.advance(0.2)

    assert (early, working.done()) == (False, True)


def test_waits_are_skewed_bounded_and_the_same_every_time():
    """Seeded: a round is the same work in every call; a few waits are many times the usual one."""
    drawn = sorted(payload["run_s"] for payload in waits(7, 500))

    assert waits(7, 500) == waits(7, 500) != waits(8, 500)
    assert drawn[-1] <= LONGEST_S
    assert drawn[-5] > 5 * drawn[250]


@pytest.mark.parametrize("tokens", [1, 9, 1024])
def test_simulated_transcripts_keep_the_invariants(tokens):
    """What goes through the pipeline could be trained on."""
    transcript.check(made_transcript(tokens))


async def test_a_pipeline_that_stands_still_is_an_error_with_numbers():
    """A benchmark never waits for ever, and says how far the work came."""
    bus = MemoryBus(SystemClock())
    await bus.create_topics(TABLE)
    tasks = make_tasks("r", no_op_payloads(3), family=FAMILY)
    start = await ends(bus, TASKS)
    await publish(bus, tasks[:2])

    with pytest.raises(WaitTimeout, match=r"2 of 3 samples were on tasks after 0.2 s"):
        await collect(bus, TASKS, start, tasks, limit_s=0.2)
