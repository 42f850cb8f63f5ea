"""No run begins with a model whose actions are mostly not allowed, unless somebody insists."""

from __future__ import annotations

import asyncio

import pytest
from suites import SUITE, MadeUpSuite
from synthetic_run import decisions, memory_bus, record_trajectories, records_of, run_config

from infra.bus import TopicPartition
from infra.clock import SystemClock
from schemas.control import Credit
from schemas.decisions import Evaluated, StepDecided
from schemas.scores import Purpose
from schemas.topics import CONTROL
from trainer import loop
from trainer.gate import GateRefused

CLOCK = SystemClock()


@pytest.fixture
async def bus():
    """Return a log with what a run may be trained on."""
    bus = await memory_bus()
    await record_trajectories(bus)
    return bus


async def train(config, bus, suite, **options):
    async with asyncio.timeout(60):
        return await loop.run(config, bus, CLOCK, evaluator=suite, **options)


async def steps(bus):
    return [d.step for _, d in await decisions(bus) if isinstance(d, StepDecided)]


async def test_the_model_is_probed_once_before_anything_is_sampled(bus, model, tmp_path):
    """The probe is a record like any evaluation, and comes first; a resumed run does not probe again."""
    config, suite = run_config(tmp_path, model, evaluation=SUITE, stop={"max_steps": 1}), MadeUpSuite()
    await train(config, bus, suite)
    await train(run_config(tmp_path, model, evaluation=SUITE), bus, suite, resume=True)

    assert [asked for asked in suite.asked if asked[0] is Purpose.GATE] == [(Purpose.GATE, 0, 0)] == suite.asked[:1]
    (probe,) = [d for _, d in await decisions(bus) if isinstance(d, Evaluated) and d.purpose is Purpose.GATE]
    assert (probe.step, probe.scores.turns, probe.scores.varied) == (0, 800, 0.5)


async def test_a_model_whose_actions_are_not_allowed_often_enough_does_not_begin(bus, model, tmp_path):
    """The error says figure, bound and what to do; nothing is granted; a second try says the same at once."""
    config, suite = run_config(tmp_path, model, evaluation=SUITE), MadeUpSuite(turns=100, valid=80)
    for resume in (False, True):
        with pytest.raises(GateRefused) as refused:
            await train(config, bus, suite, resume=resume)

    text = str(refused.value)
    assert "80.0% of 8000 turns were allowed actions, so at least 79.1% are (95 %), and 80% are needed" in text
    assert "Warm-start the model further" in text
    assert "`--resume --force` begins all the same" in text
    assert (refused.value.exit_code, len(suite.asked), await steps(bus)) == (3, 1, [])
    control = await records_of(bus, CONTROL, TopicPartition("control", 0))
    assert not [record for record in control if isinstance(record, Credit)]


async def test_force_begins_all_the_same(bus, model, tmp_path, caplog):
    """At once, or with a run that was refused before; it says what it was told."""
    config, suite = run_config(tmp_path, model, evaluation=SUITE), MadeUpSuite(valid=7)
    with pytest.raises(GateRefused):
        await train(config, bus, suite)

    result = await train(config, bus, suite, resume=True, force=True)

    assert (result.steps, [a[0] for a in suite.asked].count(Purpose.GATE)) == (4, 1)
    assert "run r begins by force: in the probe r.gate.0.v0 70.0% of 800 turns" in caplog.text
    # It has begun: nobody asks any more.
    await train(run_config(tmp_path, model, evaluation=SUITE, stop={"max_steps": 5}), bus, suite, resume=True)


async def test_a_probe_of_too_few_turns_proves_nothing(bus, model, tmp_path):
    """However good they were."""
    with pytest.raises(GateRefused, match=r"had 240 turns of 40 tasks, 256 are needed to judge.*more tasks"):
        await train(run_config(tmp_path, model, evaluation=SUITE), bus, MadeUpSuite(turns=3, valid=3))


@pytest.mark.parametrize(
    ("mixed", "filtered", "warned"), [(1, "success", True), (2, "success", False), (1, "reward", False)]
)
async def test_a_run_that_will_mostly_sample_in_vain_is_warned(bus, model, tmp_path, caplog, mixed, filtered, warned):
    """The probe's groups are as large as the run's: the share of those that differ in success is what to expect."""
    caplog.set_level("INFO")
    algorithm = {"filter": filtered}
    config = run_config(tmp_path, model, evaluation=SUITE, algorithm=algorithm, stop={"max_steps": 1})

    await train(config, bus, MadeUpSuite(gate=mixed))

    assert f"run r: {mixed / 0.4:.1f} % of 40 groups differ in success" in caplog.text
    assert ("only 2.5 % of the probe's 40 groups differ" in caplog.text) is warned
