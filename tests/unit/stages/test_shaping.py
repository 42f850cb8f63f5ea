"""How a grade counts for a task: weights, penalties for repeated and over-long actions, milestones once per state."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from infra.errors import Failure
from schemas.messages import Rollout, Shaping
from schemas.outcome import StopReason
from schemas.transcript import SampledSpan, Sampling, Transcript, Turn, pack_logprobs, pack_tokens
from stages.eval.shaping import led_to_new, overlong, repeated, shaped
from stages.eval.stage import grade
from stages.handlers.base import Grade
from tests.logs import make_task


def transcript(*turns):
    """Return the record of turns given as (observation, answer), each a list of ids."""
    ids, mask, spans, found = [], [], [], []
    for observation, answer in turns:
        start = len(ids)
        ids += [*observation, *answer]
        mask += [0] * len(observation) + [1] * len(answer)
        sampled, stop = start + len(observation), len(ids)
        times = {"began_ms": 0, "generated_ms": 0, "ended_ms": 0}
        found.append(Turn(start=start, sampled=sampled, stop=stop, valid=True, action="", finish="stop", **times))
        made = {"version": 0, "sampling": Sampling(), "dtype": "float32", "logprobs_mode": "processed_logprobs"}
        spans.append(SampledSpan(start=sampled, stop=stop, **made))
    return Transcript(
        tokens=pack_tokens(np.array(ids, dtype=np.int32)),
        mask=bytes(mask),
        logprobs=pack_logprobs(np.zeros(len(ids))),
        spans=tuple(spans),
        turns=tuple(found),
    )


ASK, TELL = [1, 1], [2]
FARMED = transcript(([7], ASK), ([8], ASK), ([8], ASK), ([8], ASK), ([8], TELL))
"""The same question again and again: the answer to it is [8], whatever was seen before."""
MILESTONES = Grade(components={"done": 0.0}, success=0.0, turn_rewards=(0.3, 0.3, 0.3, 0.3, 0.0))


def test_an_action_is_repeated_where_the_same_was_seen_before():
    """The first answer to what it led to is a new situation."""
    assert repeated(FARMED) == [False, False, True, True, False]
    assert repeated(transcript(([7], ASK), ([8], ASK), ([9], ASK))) == [False, False, False]
    assert repeated(transcript()) == []


def test_a_milestone_is_paid_once_per_state():
    """Asking leads to the answer once; what was farmed is gone, and what was earned stays."""
    assert led_to_new(FARMED) == [True, False, False, False, True]

    found = shaped(MILESTONES, FARMED, Shaping(once_per_state=True))

    assert found.turn_rewards == pytest.approx((0.3, 0.0, 0.0, 0.0, 0.0))


def test_a_last_turn_is_paid_unless_it_repeats_one():
    """What it led to is in no record."""
    assert led_to_new(transcript(([7], ASK))) == [True]
    assert led_to_new(transcript(([7], ASK), ([8], TELL), ([8], TELL))) == [True, False, False]
    assert led_to_new(transcript()) == []


def test_an_action_is_too_long_by_tokens_or_because_it_was_cut_off():
    """Without a number only the engine says so."""
    record = transcript(([7], [1]), ([8], [1, 2, 3]))
    cut = msgspec.structs.replace(
        record, turns=(msgspec.structs.replace(record.turns[0], finish="length"), record.turns[1])
    )

    assert overlong(record, Shaping()) == [False, False]
    assert overlong(record, Shaping(long_action=2)) == [False, True]
    assert overlong(cut, Shaping(long_action=3)) == [True, False]


def test_weights_scale_components_and_turns():
    """What is not named counts once, and a penalty only where it is named."""
    given = Grade(components={"done": 1.0, "format": -0.5}, success=1.0, turn_rewards=(0.25,) * 5)
    found = shaped(given, FARMED, Shaping(weights={"format": 2.0, "repeated_actions": 0.125, "process": 0.5}))

    assert found.components == {"done": 1.0, "format": -1.0, "repeated_actions": -0.25}
    assert found.turn_rewards == (0.125,) * 5
    assert found.success == 1.0
    assert shaped(given, FARMED, Shaping(weights={"long_actions": 1.0}, long_action=1)).components == {
        "done": 1.0,
        "format": -0.5,
        "long_actions": -4.0,
    }


def test_a_family_that_gives_such_a_component_keeps_its_own():
    """It knows better what a repetition is."""
    given = Grade(components={"repeated_actions": -7.0}, success=0.0)

    assert shaped(given, FARMED, Shaping(weights={"repeated_actions": 0.5})).components == {"repeated_actions": -3.5}


def test_without_a_stamp_a_grade_stays_as_it_is():
    """So does every record of a run that has none."""
    assert shaped(MILESTONES, FARMED, None) is MILESTONES


@pytest.mark.usefixtures("families")
async def test_eval_weighs_what_the_task_says():
    """The reward is the sum of what counts, so the record alone tells what was trained on."""
    weights = {"opened": 2.0, "shape": 0.0, "repeated_actions": 0.5}
    task = make_task(family="toy", payload={"components": {"opened": 1.0, "shape": -0.25}, "success": 1.0})
    rollout = Rollout(
        task=msgspec.structs.replace(task, shaping=Shaping(weights=weights)),
        transcript=FARMED,
        verdict={"actions": ["hello"]},
        stop=StopReason.DONE,
        backend="scripted",
        worker="run-1",
        tokenizer_digest="d",
    )
    outcome = (await grade(rollout)).message.outcome

    assert outcome.components == {"repeated_actions": -1.0, "opened": 2.0, "shape": 0.0}
    assert (outcome.reward, outcome.success) == (1.0, 1.0)


@pytest.mark.usefixtures("families")
async def test_a_weight_that_makes_a_reward_infinite_is_no_reward():
    """The rollout fails with the component's name."""
    task = make_task(family="toy", payload={"components": {"opened": 1e300}, "success": 1.0})
    rollout = Rollout(
        task=msgspec.structs.replace(task, shaping=Shaping(weights={"opened": 1e300})),
        transcript=FARMED,
        verdict={"actions": ["hello"]},
        stop=StopReason.DONE,
        backend="scripted",
        worker="run-1",
        tokenizer_digest="d",
    )
    with pytest.raises(Failure, match="opened is inf"):
        await grade(rollout)
