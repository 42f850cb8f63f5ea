import math

import msgspec
import pytest

from infra.bus import Record
from infra.wire import Received
from schemas.codec import decode, encode
from schemas.messages import Trajectory
from tests.golden.samples import SAMPLES
from trainer.algorithm_config import Overlong
from trainer.terminal import terminal

GRADED = SAMPLES["rollmill.trajectory"]
"""Two turns with process rewards 1/4 and 0, five sampled tokens, reward -1/2."""


def received(trajectory):
    raw = encode(trajectory)
    record = Record(topic="trajectories", partition=0, offset=7, timestamp_ms=0, key=None, value=raw)
    return Received(record, trajectory, raw)


def graded(**changes):
    """Return the sample with another grade."""
    return received(msgspec.structs.replace(GRADED, outcome=msgspec.structs.replace(GRADED.outcome, **changes)))


@pytest.mark.parametrize("keep_tokens", [True, False])
def test_what_decides_is_the_same_with_and_without_tokens(keep_tokens):
    """Replay keeps no token and must find the same rewards."""
    found = terminal(received(GRADED), Overlong(max_tokens=6, cache_tokens=2), keep_tokens=keep_tokens)

    assert (found.offset, found.reward, found.truncated) == (7, -1.0, False)
    assert (found.turns, found.turn_rewards) == (2, (0.25, 0.0))
    assert found.sampled == ((5, 3), (6, 2))
    assert (found.transcript is not None) is keep_tokens


def test_an_outcome_without_process_rewards_still_tells_its_turns():
    """Beside siblings with process rewards each of them earned 0."""
    found = terminal(graded(turn_rewards=()), None)

    assert (found.turns, found.turn_rewards) == (2, ())


def test_an_outcome_without_a_grade_has_nothing_to_add():
    """It is in neither batch nor baseline."""
    found = terminal(received(SAMPLES["rollmill.trajectory.failed"]), None)

    assert (found.completed, found.turns, found.turn_rewards) == (False, 0, ())


@pytest.mark.parametrize(
    "changes", [{"reward": math.nan}, {"success": math.inf}, {"success": 2.0}, {"turn_rewards": (1.0,)}]
)
def test_a_grade_that_cannot_count_is_a_failed_sibling_to_the_trainer(changes):
    """It ends its sample, whoever wrote it, and neither trains nor stops anything."""
    raw = encode(graded(**changes).message)
    record = Record(topic="trajectories", partition=0, offset=7, timestamp_ms=0, key=None, value=raw)

    assert not terminal(Received(record, decode(raw, Trajectory), raw), None).completed
