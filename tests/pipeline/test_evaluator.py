"""A suite is played through the pipeline as a run of its own; what the system failed is played once more."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from infra.bus import TopicPartition
from infra.config import Config
from infra.control import ControlView
from infra.errors import ConfigError
from infra.memory import MemoryBus
from infra.wire import Publisher, unpack
from rollmill.evaluator import LATE_S, SUITE, PipelineEvaluator, second_try
from schemas.control import RunManifest
from schemas.messages import Trajectory
from schemas.outcome import Boundary, Completed, Expired, Failed, FailureKind
from schemas.scores import Purpose
from schemas.topics import TABLE, TASKS, TRAJECTORIES
from schemas.transcript import SampledSpan, Sampling, Transcript, Turn, pack_logprobs, pack_tokens
from stages.handlers.keydoor import WORDS
from stages.pipeline import Outside, Pipeline
from stages.run.render import Renderer
from tests.fast_clock import FastClock
from tests.logs import read_all, wait_until
from tests.model_directory import word_model
from tests.pipeline.faulty import FaultyPolicy, RestartingHost
from tests.served import put_in_place
from trainer.config import CurriculumConfig, make_config

BROKEN = Failed(kind=FailureKind.ENGINE, boundary=Boundary.POLICY, cause="made up")
HUNTS = {"family": "keydoor", "payload": {"size": 4}, "count": 4}


def run_config(tmp_path, tasks=HUNTS, **changes):
    """Return a run with a suite of four hunts, one sample each."""
    return make_config(
        {
            "run": "r",
            "seed": 3,
            "model": tmp_path,
            "directory": tmp_path,
            "tasks": {"family": "keydoor", "payload": {"size": 4}, "max_tokens": 9, "budgets": {"run_s": 60.0}},
            "algorithm": {"samples": 3, "horizon": 12, "temperature": 0.8},
            "evaluation": {"tasks": tasks, "temperature": 0.25, **changes},
        }
    )


def graded(success, versions=(7, 7)):
    """Return outcome and token record of an episode of two turns, each sampled by one version."""
    spans = [
        SampledSpan(
            start=at, stop=at + 1, version=version, sampling=Sampling(), dtype="float32", logprobs_mode="processed"
        )
        for at, version in zip((1, 3), versions, strict=True)
    ]
    turns = [
        Turn(
            start=at - 1,
            sampled=at,
            stop=at + 1,
            valid=at == 1,
            action="",
            finish="stop",
            began_ms=0,
            generated_ms=0,
            ended_ms=0,
        )
        for at in (1, 3)
    ]
    transcript = Transcript(
        tokens=pack_tokens([1, 2, 1, 2]),
        mask=bytes([0, 1, 0, 1]),
        logprobs=pack_logprobs([0, -1, 0, -1]),
        spans=tuple(spans),
        turns=tuple(turns),
    )
    return Completed(components={}, reward=success / 2, success=success, truncated=False), transcript


@asynccontextmanager
async def stages(bus, clock, answer):
    """Be all stages while the block runs: end each task as `answer` says, or not at all; yield the tasks met."""
    publisher, met = Publisher(bus, clock, "eval"), []

    async def work():
        reader = await bus.read({TopicPartition(TASKS.name, part): 0 for part in range(TASKS.partitions)})
        while True:
            for record in await reader.poll(100, 0.5):
                task = (await unpack(TASKS, record)).message
                met.append(task)
                if (ended := answer(task)) is not None:
                    outcome, transcript = ended
                    end = Trajectory(task=task, outcome=outcome, transcript=transcript, stage="eval")
                    await publisher.publish(TRAJECTORIES, end)

    working = asyncio.create_task(work())
    try:
        yield met
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


class JumpingClock(FastClock):
    """Time that a test may move forward."""

    jumped_ms = 0

    def now_ms(self):
        return super().now_ms() + self.jumped_ms


async def log_and_clock():
    """Return a log with all topics, and time that passes twenty times as fast."""
    clock = JumpingClock(factor=20)
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    return bus, clock


async def test_a_suite_is_played_by_the_whole_pipeline(tmp_path):
    """The expert, whose weights are the run's version 7, opens every door of the suite, and the figures say so."""
    clock = FastClock()
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    renderer = Renderer(word_model(tmp_path / "model", WORDS))
    outside = Outside(host=RestartingHost(clock), policy=FaultyPolicy(renderer), renderer=renderer)
    await put_in_place(outside.policy, tmp_path, 7, "r")
    pipeline = Pipeline(bus, clock, Config(), outside)
    async with outside.host:
        running = asyncio.create_task(pipeline.run())
        found = await PipelineEvaluator(bus, clock, run_config(tmp_path), tmp_path).evaluate(7, 0, Purpose.EVALUATION)
        pipeline.stop()
        await asyncio.wait_for(running, 15)

    assert (found.success, found.tasks, found.missing, found.valid, found.incomplete) == (1.0, 4, 0, 1.0, False)
    assert found.turns > 4


async def test_a_suite_is_a_run_of_its_own_as_the_configuration_says(tmp_path):
    """Held-out names and seeds, the run's horizon, the limits of its tasks, the version as the lowest one."""
    bus, clock = await log_and_clock()
    config = run_config(tmp_path, samples=2)
    async with stages(bus, clock, lambda task: graded(1.0)) as met:
        found = await PipelineEvaluator(bus, clock, config, tmp_path).evaluate(7, 20, Purpose.EVALUATION)
        await PipelineEvaluator(bus, clock, config, tmp_path).evaluate(7, 20, Purpose.GATE)

    control = ControlView(bus, clock)
    await control.start()
    manifest = control.get("run/r.eval.20.v7", RunManifest)
    assert (found.run, manifest.paced) == (manifest.run, False)
    assert manifest.extra == {"evaluates": {"run": "r", "step": 20, "version": 7, "for": "evaluation"}}
    evaluated = [task for task in met if task.run == manifest.run]
    assert [len(evaluated), {task.sampling.temperature for task in evaluated}] == [8, {0.25}]
    gate = [task for task in met if task.run == "r.gate.20.v7"]
    assert [len(gate), {task.sampling.temperature for task in gate}] == [12, {0.8}]
    for task in met:
        assert (task.min_version, task.horizon, task.sampling.max_tokens, task.budgets.run_s) == (7, 12, 9, 60.0)
        assert (task.source, task.admission, task.weights_of) == (SUITE, None, "r")


async def test_an_evaluation_has_the_horizon_of_the_last_stage_and_the_gate_that_of_the_first(tmp_path):
    """A version is measured by what it is trained for; temperature is training's where the section gives none."""
    bus, clock = await log_and_clock()
    curriculum = {"every": 5, "horizons": [4, 8, 20], "temperatures": [1.0, 0.5]}
    config = run_config(tmp_path).model_copy(update={"curriculum": CurriculumConfig(**curriculum)})
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"temperature": None})})
    async with stages(bus, clock, lambda task: graded(1.0)) as met:
        for purpose in Purpose:
            await PipelineEvaluator(bus, clock, config, tmp_path).evaluate(7, 0, purpose)

    stamped = {task.run.split(".")[1]: (task.horizon, task.sampling.temperature) for task in met}
    assert stamped == {"eval": (20, 0.5), "gate": (4, 1.0)}


async def test_what_failed_is_played_once_more_with_the_same_seeds(tmp_path):
    """The second outcome counts; a sample that fails again is missing."""
    bus, clock = await log_and_clock()

    def answer(task):
        first = task.redrive_of is None
        return (BROKEN, None) if task.row == 0 or (task.row == 1 and first) else graded(1.0)

    async with stages(bus, clock, answer) as met:
        found = await PipelineEvaluator(bus, clock, run_config(tmp_path), tmp_path).evaluate(7, 1, Purpose.EVALUATION)

    again = {task.row: task for task in met if task.redrive_of is not None}
    first = {task.row: task for task in met if task.redrive_of is None}
    assert sorted(again) == [0, 1]
    for row, task in again.items():
        assert (task.seed, task.sample, task.redrive_of) == (first[row].seed, first[row].sample, first[row].group)
        assert task == second_try(first[row])
    assert (found.samples, found.missing, found.success, found.worst, found.best) == (4, 1, 1.0, 0.75, 1.0)
    assert found.incomplete


@pytest.mark.parametrize("versions", [(7, 8), (8, 8), (6, 7)])
async def test_a_sample_in_which_other_weights_had_a_part_does_not_count(tmp_path, versions):
    """It is played once more like a failure, and counted by itself if that does not help."""
    bus, clock = await log_and_clock()

    def answer(task):
        helped = task.row == 1 and task.redrive_of is not None
        return graded(1.0, versions if task.row < 2 and not helped else (7, 7))

    async with stages(bus, clock, answer) as met:
        found = await PipelineEvaluator(bus, clock, run_config(tmp_path), tmp_path).evaluate(7, 1, Purpose.EVALUATION)

    assert [task.row for task in met if task.redrive_of is not None] == [0, 1]
    assert (found.missing, found.mixed, found.turns) == (1, 1, 6)


async def test_a_sample_of_which_nothing_comes_is_missing_once_its_time_is_up(tmp_path, caplog):
    """The wait ends by the tasks' own limits, and says what it waited for; nothing is played again for it."""
    bus, clock = await log_and_clock()
    config = run_config(tmp_path, {**HUNTS, "budgets": {"init_s": 1.0, "run_s": 1.0, "eval_s": 1.0}}, start_within_s=1)

    async def ended():
        return len(await read_all(bus, TRAJECTORIES))

    async with stages(bus, clock, lambda task: graded(0.0) if task.row else None) as met:
        evaluator = PipelineEvaluator(bus, clock, config, tmp_path)
        evaluating = asyncio.create_task(evaluator.evaluate(7, 1, Purpose.EVALUATION))
        await wait_until(ended, 3)
        clock.jumped_ms = 34_000 + int(LATE_S * 1000)
        found = await evaluating

    assert (found.missing, len(met)) == (1, 4)
    assert "nothing came of 1 of them, first SampleId(run='r.eval.1.v7'" in caplog.text


async def test_who_evaluates_again_finds_what_has_ended(tmp_path):
    """A trainer died while it waited: its successor publishes the same samples, and the first outcomes count."""
    bus, clock = await log_and_clock()
    config = run_config(tmp_path)
    async with stages(bus, clock, lambda task: (Expired(cause="x"), None) if task.row == 3 else graded(1.0)):
        first = await PipelineEvaluator(bus, clock, config, tmp_path).evaluate(7, 1, Purpose.EVALUATION)
    async with stages(bus, clock, lambda task: None):
        again = await PipelineEvaluator(bus, clock, config, tmp_path).evaluate(7, 1, Purpose.EVALUATION)

    assert again == first
    groups = {(await unpack(TASKS, record)).message.group for record in await read_all(bus, TASKS)}
    assert len(groups) == 5


@pytest.mark.parametrize(
    ("tasks", "complaint"),
    [
        ({"family": "keydoor"}, "give `count`"),
        ({"payload": {}}, "either `jsonl`"),
        ({"jsonl": "none.jsonl"}, "cannot read"),
    ],
)
def test_a_suite_without_an_end_or_without_tasks_is_refused(tmp_path, tasks, complaint):
    """Before anything starts."""
    with pytest.raises(ConfigError, match=complaint):
        PipelineEvaluator(None, None, run_config(tmp_path, tasks), tmp_path)


def test_a_file_is_passed_once(tmp_path):
    """Where tasks to train on are passed again and again."""
    (tmp_path / "held-out.jsonl").write_text('{"family": "keydoor", "payload": {"size": 4}}\n' * 3)
    evaluator = PipelineEvaluator(None, None, run_config(tmp_path, {"jsonl": "held-out.jsonl"}), tmp_path)

    assert [instance.row for instance in evaluator._source.instances()] == [1, 2, 3]
