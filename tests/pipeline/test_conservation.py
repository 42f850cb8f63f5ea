"""The conservation law at all times: at each record of a run's log, every admitted sample is in exactly one place.

Not only at the end: a run that is being fed, sampled, trained, killed, taken up again, taken back and ended is looked
at behind each of its records, in the order in which they came over all topics.
"""

from __future__ import annotations

import random

import pytest
from mortal import Fate
from mortal_run import PARTS, MortalRun
from synthetic_run import SAMPLES, run_config

from infra.wire import unpack
from schemas.arbiter import Arbiter, Ruling
from schemas.decisions import live_decisions
from schemas.dispositions import Disposition, dispositions
from schemas.topics import DECISIONS, TASKS, TRAJECTORIES

SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed >= 3 else ()) for seed in range(12)]
ROWS = 40
TOPICS = {topic.name: topic for topic in (TASKS, TRAJECTORIES, DECISIONS)}


def any_end(task):
    """Return success or none for a failure, from the task alone: who does it again finds the same."""
    number = task.row * SAMPLES + task.sample
    return None if number % 7 == 4 else float(random.Random(number).random() < 0.5)


async def books_at_each_record(told):
    """Yield (samples admitted, their ledger) behind each record that was told."""
    admitted, accepted, log, arbiter = {}, {}, [], Arbiter()
    for record in told:
        if record.topic not in TOPICS:
            continue
        message = (await unpack(TOPICS[record.topic], record)).message
        if record.topic == TASKS.name:
            admitted[message.group, message.sample] = None
        elif record.topic == DECISIONS.name:
            log.append((record.offset, message))
        else:
            task = message.task
            if arbiter.rule(task.group, task.sample, task.payload_digest, record.offset) is Ruling.ACCEPTED:
                accepted[task.group, task.sample] = (record.offset, message.outcome)
        live = [decision for _, decision in live_decisions(log)]
        yield len(admitted), dispositions(admitted, accepted, live, has_trainer=True)


@pytest.mark.parametrize("seed", SEEDS)
async def test_at_every_moment_of_a_run_each_admitted_sample_is_in_one_place(model, tmp_path, seed):
    """Whatever died, and with failures, dropped groups, undone steps and an end: nothing is lost and nothing twice."""
    draw = random.Random(seed)
    fates = {part: Fate(draw.randint(1, 60)) for part in PARTS}
    rules = {"groups": 2, "samples": SAMPLES, "max_lag": 1, "min_siblings": 2}
    config = run_config(tmp_path, model, algorithm=rules, checkpoints={"keep": 9}, stop={"max_steps": 3})
    run = await MortalRun(config, rows=ROWS, success=any_end, fates=fates).run()
    await run.go_back(1, run_config(tmp_path, model, algorithm=rules, stop={"max_steps": 3}))

    seen, looked_at = set(), 0
    async for admitted, books in books_at_each_record(run.bus.told):
        assert (books.violations, sum(books.counts().values())) == ([], admitted)
        seen |= set(books.places.values())
        looked_at += 1

    assert looked_at > 50
    # What waits or is unused depends on who was quicker; these there are in any order.
    assert seen >= {Disposition.OPEN, Disposition.UNREAD, Disposition.TRAINED, Disposition.ROLLED_BACK}
    assert seen >= {Disposition.FAILED, Disposition.FILTERED}
