"""Two runs over logs that differ in one thing, and what `diff` says about it."""

import asyncio

import msgspec
import numpy as np
import pytest
from synthetic_run import RUN, memory_bus, record_trajectories, run_config

from infra.bus import TopicPartition
from infra.clock import SystemClock
from infra.errors import ConfigError
from infra.reading import read_between
from infra.trajectories import read_trajectory, trajectories_of
from infra.wire import Publisher
from schemas.outcome import Completed
from schemas.topics import TRAJECTORIES
from schemas.transcript import pack_tokens
from trainer import loop
from trainer.diff import Kind, diff, other_tokens
from trainer.story import read_story

CLOCK = SystemClock()
OTHER = "s"


async def copied(bus, edit=lambda trajectory: trajectory, order=lambda found: found):
    """Publish the log of RUN once more as that of another run, each record edited."""
    partition = trajectories_of(RUN)
    end = (await bus.end_offsets(partition.topic))[partition.partition]
    found = []
    async for record in read_between(bus, CLOCK, {partition: 0}, {partition: end}):
        received = await read_trajectory(record, RUN, bus)
        if received is not None:
            found.append(edit(received.message))
    publisher = Publisher(bus, CLOCK, "test")
    for made in order(found):
        task = msgspec.structs.replace(made.task, run=OTHER, group=f"{OTHER}-{made.task.group}")
        await publisher.publish(TRAJECTORIES, msgspec.structs.replace(made, task=task))


async def two_runs(model, tmp_path, edit=lambda trajectory: trajectory, order=lambda found: found, **changes):
    """Return a bus with a finished run and another one over an edited copy of its log."""
    bus = await memory_bus()
    await record_trajectories(bus)
    await copied(bus, edit, order)
    other = {"run": OTHER, **changes}
    async with asyncio.timeout(120):
        await loop.run(run_config(tmp_path, model), bus, CLOCK)
        config = run_config(tmp_path, model, name="two", **{k: v for k, v in other.items() if k != "run"})
        await loop.run(config.model_copy(update={"run": OTHER}), bus, CLOCK)
    return bus


async def member_of(bus, step, number=0):
    """Return the place and sibling number of a member of a step of RUN."""
    story = await read_story(bus, CLOCK, RUN)
    member = story.steps[step].members[number]
    return story.places[member.group], member


def only(place, sample, change):
    """Return an edit of one sample."""

    def edit(made):
        here = (made.task.row, made.task.sample) == (place.row, sample)
        return change(made) if here else made

    return edit


async def finished(model, tmp_path):
    """Return a bus with a finished run."""
    bus = await memory_bus()
    await record_trajectories(bus)
    async with asyncio.timeout(60):
        await loop.run(run_config(tmp_path, model, name="zero"), bus, CLOCK)
    return bus


async def test_a_run_over_the_same_outcomes_does_not_differ(model, tmp_path):
    """Other names, other offsets, other groups' ids: nothing that is trained on."""
    found = await diff(await two_runs(model, tmp_path), CLOCK, RUN, OTHER)

    assert found.empty, found.divergence
    assert (found.same_steps, found.steps, found.settings) == (4, (4, 4), {})


async def test_a_changed_record_of_a_run_is_named(model, tmp_path):
    """One flipped bit, found by comparing the run with itself."""
    bus = await finished(model, tmp_path)
    _, member = await member_of(bus, 2)
    partition = TopicPartition(TRAJECTORIES.name, trajectories_of(RUN).partition)
    bus.log.rewrite(partition, member.offset, lambda value: value.replace(b"made-up", b"Made-up", 1))

    found = await diff(bus, CLOCK, RUN, RUN)

    assert (found.divergence.step, found.divergence.kind) == (2, Kind.CHANGED)
    assert f"{member.group}/{member.sample}" in found.divergence.cause
    assert f"offset {member.offset}" in found.divergence.cause


async def test_a_sampled_token_that_differs_is_named_with_its_turn(model, tmp_path):
    """And whose it is: the policy's, by which version."""
    first = await finished(model, tmp_path)
    place, member = await member_of(first, 3)

    def another_token(made):
        tokens = made.transcript.token_ids.copy()
        tokens[6] = (tokens[6] + 1) % 20
        return msgspec.structs.replace(
            made, transcript=msgspec.structs.replace(made.transcript, tokens=pack_tokens(tokens))
        )

    bus = await two_runs(model, tmp_path, only(place, member.sample, another_token))
    found = await diff(bus, CLOCK, RUN, OTHER)

    assert (found.divergence.step, found.divergence.kind) == (3, Kind.SAMPLES)
    assert f"{place}, sample {member.sample}: tokens differ from 6 on (turn 1" in found.divergence.cause
    assert "both by version 0" in found.divergence.cause


async def test_another_grade_of_the_same_tokens_is_the_graders(model, tmp_path):
    """The reward differs and no token does."""
    first = await finished(model, tmp_path)
    place, member = await member_of(first, 1)

    def another_grade(made):
        outcome = Completed(components={"done": 9.0}, reward=9.0, success=made.outcome.success, truncated=False)
        return msgspec.structs.replace(made, outcome=outcome)

    bus = await two_runs(model, tmp_path, only(place, member.sample, another_grade))
    found = await diff(bus, CLOCK, RUN, OTHER)

    assert (found.divergence.step, found.divergence.kind) == (1, Kind.SAMPLES)
    assert "the same tokens were graded otherwise" in found.divergence.cause
    assert "another grader" in found.divergence.cause


async def test_groups_that_became_complete_in_another_order_are_traced_to_it(model, tmp_path):
    """The same outcomes, the last first: step 1 holds other groups, which the other run used later or not at all."""
    bus = await two_runs(model, tmp_path, order=lambda found: found[::-1])

    found = await diff(bus, CLOCK, RUN, OTHER)

    assert (found.divergence.step, found.divergence.kind) == (1, Kind.GROUPS)
    assert "trains on made up[" in found.divergence.cause
    assert "complete" in found.divergence.cause


async def test_other_settings_are_listed_and_explain_other_weights(model, tmp_path):
    """The learning rate moves no batch, only the weights."""
    bus = await two_runs(model, tmp_path, algorithm={"lr": 1e-2})

    found = await diff(bus, CLOCK, RUN, OTHER)

    assert (found.divergence.step, found.divergence.kind) == (1, Kind.WEIGHTS)
    assert found.settings == {"algorithm.lr": (3e-4, 1e-2)}


async def test_a_run_that_ended_sooner_says_why(model, tmp_path):
    """All its steps are the same."""
    bus = await two_runs(model, tmp_path, stop={"max_steps": 2})

    found = await diff(bus, CLOCK, RUN, OTHER)

    assert (found.divergence.step, found.divergence.kind, found.same_steps) == (3, Kind.LENGTH, 2)
    assert "2 steps made" in found.divergence.cause


async def test_a_run_without_a_trainer_is_refused():
    """There is nothing to compare."""
    with pytest.raises(ConfigError, match="no trainer ever started"):
        await diff(await memory_bus(), CLOCK, "nobody", RUN)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": 4}, "an observation or prompt, so the environment or the prompt is not the same"),
        ({"logprobs": 5}, "the same tokens with other log-probs from token 5 on"),
        ({"version": 3}, "by version 0 and by version 3"),
    ],
)
async def test_token_records_say_where_they_part(model, tmp_path, change, says):
    """Observations are the environment's, log-probs the engine's, versions the trainer's."""
    from synthetic_run import task, trajectory

    first = trajectory(task(0, 0), 1.0).transcript
    second = first
    if "tokens" in change:
        tokens = first.token_ids.copy()
        tokens[change["tokens"]] = (tokens[change["tokens"]] + 1) % 20
        second = msgspec.structs.replace(first, tokens=pack_tokens(tokens))
    if "logprobs" in change:
        values = first.logprob_array.copy()
        values[change["logprobs"]] -= np.float32(0.5)
        second = msgspec.structs.replace(first, logprobs=values.tobytes())
    if "version" in change:
        values = first.logprob_array.copy()
        values[5] -= np.float32(0.5)
        spans = tuple(msgspec.structs.replace(span, version=3) for span in first.spans)
        second = msgspec.structs.replace(first, logprobs=values.tobytes(), spans=spans)

    assert says in other_tokens(first, second)
    assert other_tokens(first, first) == ""
