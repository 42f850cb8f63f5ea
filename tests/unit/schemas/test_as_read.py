"""What a terminal record counts as: the same to every reader, whoever wrote it."""

from __future__ import annotations

import math

import msgspec
import pytest

from schemas.codec import decode, encode
from schemas.messages import Trajectory
from schemas.outcome import Boundary, Failed, FailureKind
from schemas.transcript import pack_logprobs
from tests.golden.samples import SAMPLES, TRANSCRIPT

GRADED = SAMPLES["rollmill.trajectory"]


def graded(**changes):
    return msgspec.structs.replace(GRADED, outcome=msgspec.structs.replace(GRADED.outcome, **changes))


def recorded(**changes):
    return msgspec.structs.replace(GRADED, transcript=msgspec.structs.replace(TRANSCRIPT, **changes))


def read(trajectory):
    return decode(encode(trajectory), Trajectory)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": math.nan}, "the sum is nan"),
        ({"reward": -math.inf}, "the sum is -inf"),
        ({"components": {"door": math.nan}}, "door is nan"),
        ({"success": math.nan}, "success is nan"),
        ({"success": 2.0}, "success is 2.0, outside [0, 1]"),
        ({"success": -0.5}, "success is -0.5, outside [0, 1]"),
        ({"turn_rewards": (0.0, math.inf)}, "the reward of turn 1 is inf"),
        ({"turn_rewards": (1.0,)}, "1 process rewards for 2 turns"),
    ],
)
def test_a_grade_that_cannot_count_ends_its_sample_as_failed(changes, says):
    """The family is named, since its grader is to be mended; nothing else of the record changes."""
    found = read(graded(**changes))

    assert (FailureKind.HANDLER, Boundary.HANDLER_GRADE) == (found.outcome.kind, found.outcome.boundary)
    assert says in found.outcome.cause
    assert "'keydoor'" in found.outcome.cause
    assert msgspec.structs.replace(found, outcome=GRADED.outcome) == GRADED


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logprobs": pack_logprobs([0, 0, 0, math.nan, -1, -1, 0, -1, -1])}, "not a finite number"),
        ({"logprobs": pack_logprobs([0, 0, 0, 0.7, -1, -1, 0, -1, -1])}, "a log-prob is 0.7"),
        ({"spans": ()}, "the spans do not cover"),
        ({"tokens": b""}, "differ in length"),
        ({"turns": ()}, "after the last turn"),
    ],
)
def test_a_token_record_that_breaks_an_invariant_ends_its_sample_as_failed(changes, says):
    """Nobody can train on it, and its sample has ended all the same."""
    found = read(recorded(**changes))

    assert (FailureKind.ENGINE, Boundary.TRANSCRIPT) == (found.outcome.kind, found.outcome.boundary)
    assert says in found.outcome.cause


@pytest.mark.parametrize("name", [name for name in SAMPLES if name.startswith("rollmill.trajectory")])
def test_a_sound_record_is_what_it_says(name):
    """Every outcome; one without a reward may hold any token record."""
    assert read(SAMPLES[name]) == SAMPLES[name]


def test_a_failure_keeps_its_own_cause_whatever_its_token_record_holds():
    """What went wrong first is what a person looks for."""
    failed = Failed(kind=FailureKind.ENVIRONMENT_LOST, boundary=Boundary.ENVIRONMENT, cause="lost")
    trajectory = msgspec.structs.replace(recorded(mask=b"\x01"), outcome=failed)

    assert read(trajectory) == trajectory


def test_a_completed_sample_without_a_token_record_counts():
    """A trainer of one's own may need none; ours trains on nothing of it."""
    trajectory = msgspec.structs.replace(graded(turn_rewards=()), transcript=None)

    assert read(trajectory) == trajectory
