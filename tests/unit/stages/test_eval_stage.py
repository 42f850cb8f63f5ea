"""Rollout -> Trajectory: a grade, or a typed failure; never a reward for what could not be graded."""

from __future__ import annotations

import math

import msgspec
import pytest

from infra.errors import Failure
from schemas.messages import Rollout
from schemas.outcome import Boundary, Completed, FailureKind, StopReason
from schemas.transcript import Transcript
from stages.eval.stage import grade
from tests.golden.samples import TRANSCRIPT
from tests.logs import make_task

EMPTY = Transcript(tokens=b"", mask=b"", logprobs=b"", spans=(), turns=())

pytestmark = pytest.mark.usefixtures("families")


def rollout(payload=None, *, family="toy", stop=StopReason.DONE, transcript=EMPTY):
    return Rollout(
        task=make_task(family=family, payload=payload or {}),
        transcript=transcript,
        verdict={"actions": ["hello"]},
        stop=stop,
        backend="scripted",
        worker="run-1",
        tokenizer_digest="d",
    )


async def failure(given):
    with pytest.raises(Failure) as caught:
        await grade(given)
    return caught.value


async def test_the_reward_is_the_sum_of_the_components_and_success_stays_apart():
    """Shaping never touches what the variance test reads."""
    given = rollout({"components": {"opened": 1.0, "shape": -0.25}, "success": 1.0})
    trajectory = (await grade(given)).message

    expected = Completed(components={"opened": 1.0, "shape": -0.25}, reward=0.75, success=1.0, truncated=False)
    assert expected == trajectory.outcome
    assert (given.task, given.transcript, given.verdict, given.stop, "scripted", "d", "eval") == (
        trajectory.task,
        trajectory.transcript,
        trajectory.verdict,
        trajectory.stop,
        trajectory.backend,
        trajectory.tokenizer_digest,
        trajectory.stage,
    )


@pytest.mark.parametrize("stop", list(StopReason))
async def test_a_limit_on_the_policy_is_truncated_and_graded_as_it_stands(stop):
    """Only turns, tokens, context and a loop truncate."""
    outcome = (await grade(rollout(stop=stop))).message.outcome

    assert outcome.truncated == (stop not in {StopReason.DONE, StopReason.INVALID_ACTION})
    assert outcome.reward == 1.0


async def test_a_handler_that_raises_in_grade_is_a_typed_failure():
    """A bug of the grader is no reward of 0."""
    failed = await failure(rollout({"raise_in": "grade"}))

    assert (FailureKind.HANDLER, Boundary.HANDLER_GRADE) == (failed.kind, failed.boundary)
    # The record keeps the place as well: whoever wrote the handler looks for it.
    assert failed.cause.startswith("RuntimeError: grade was told to fail (toys.py:")


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ({"components": {"said": math.nan}}, "said is nan"),
        ({"components": {"said": math.inf}}, "said is inf"),
        ({"components": {"one": 1e308, "two": 1e308}}, "OverflowError"),
        ({"components": {"said": None}}, "TypeError"),
        ({"components": None}, "AttributeError"),
        ({"success": math.nan}, "success is nan"),
        ({"success": 1.5}, r"success is 1.5, outside \[0, 1\]"),
        ({"success": -0.1}, "outside"),
        ({"turn_rewards": [0.0, math.nan]}, "the reward of turn 1 is nan"),
        ({"turn_rewards": [1.0]}, "1 process rewards for 0 turns: give one for each turn, or none"),
        ({"turn_rewards": None}, "TypeError"),
    ],
)
async def test_a_grade_that_is_no_finite_number_is_the_graders_failure(payload, says):
    """Neither NaN nor a number outside of its range ever reaches the trainer."""
    with pytest.raises(Failure, match=says) as caught:
        await grade(rollout(payload))

    assert (FailureKind.HANDLER, Boundary.HANDLER_GRADE) == (caught.value.kind, caught.value.boundary)


async def test_process_rewards_stand_beside_the_reward_one_per_turn():
    """They say which turn was good; the shaped reward stays the sum of the components."""
    given = rollout({"turn_rewards": [0, 0.5]}, transcript=TRANSCRIPT)

    outcome = (await grade(given)).message.outcome

    assert (1.0, (0.0, 0.5)) == (outcome.reward, outcome.turn_rewards)
    assert {float} == set(map(type, outcome.turn_rewards))


async def test_a_grader_may_count_with_numpy():
    """Its numbers become plain ones, which have a form on the wire."""
    given = rollout({"numpy": True})
    trajectory = (await grade(given)).message

    assert (0.5, 1.0) == (trajectory.outcome.reward, trajectory.outcome.success)
    assert {float} == {type(number) for number in (*trajectory.outcome.components.values(), trajectory.outcome.success)}


async def test_an_unknown_family_names_the_known_ones():
    """A rollout of a family that was uninstalled meanwhile fails alone."""
    failed = await failure(rollout(family="chess"))

    assert (FailureKind.INVALID_TASK, "known: ") == (failed.kind, failed.cause[failed.cause.index("known: ") :][:7])
    assert "keydoor" in failed.cause


async def test_a_token_record_that_cannot_be_used_is_no_graders_matter():
    """The rollout is made again: every reader of its outcome would take it for failed."""
    failed = await failure(rollout(transcript=msgspec.structs.replace(TRANSCRIPT, mask=b"\x01")))

    assert (FailureKind.ENGINE, Boundary.TRANSCRIPT) == (failed.kind, failed.boundary)
    assert "differ in length" in failed.cause
