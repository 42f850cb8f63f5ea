"""What the demo says of its control, and that a control differs from the demo in its rewards alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.demo.control import difference
from rollmill.demo.recipe import Recipe

HUNTS = range(200)


def outcomes(solved):
    """Return the success of 200 hunts, of which the first ones are solved."""
    return {hunt: float(hunt < solved) for hunt in HUNTS}


@pytest.mark.parametrize(
    ("before", "after", "rose"), [(50, 50, False), (50, 52, False), (50, 10, False), (50, 70, True)]
)
def test_a_control_rose_if_it_did_so_by_more_than_chance(before, after, rose):
    """Hunt by hunt: what is solved both times says nothing, and a fall is no rise."""
    moved = difference(outcomes(before), outcomes(after))

    assert moved.rose is rose
    assert moved.mean == pytest.approx((after - before) / len(HUNTS))
    assert moved.low <= moved.mean <= moved.high


def test_only_hunts_that_were_played_both_times_are_compared():
    """A sample that is missing is no failure."""
    assert difference({0: 1.0, 1: 0.0}, {1: 0.0, 2: 1.0}).mean == 0


def test_what_moved_is_said_in_one_line():
    """With its sign and its interval."""
    assert str(difference(outcomes(0), outcomes(200))) == "+1.00 (+1.00 to +1.00)"


def test_a_control_is_the_demo_with_shuffled_rewards_and_nothing_else():
    """What is shuffled follows from the demo's seed."""
    plain, control = (
        Recipe(shuffled=shuffled).run_toml("r", 3, Path("model"), Path("trainer")) for shuffled in (False, True)
    )

    assert control["algorithm"].pop("shuffle_seed") == 3
    assert control == plain
