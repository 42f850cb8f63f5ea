"""What the demo says of its control, and that a control differs from the demo in its rewards alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.demo.control import rose
from rollmill.demo.recipe import Recipe
from trainer.evaluation import Played, scores


def solving(hunts, of=256):
    """Return the figures of a policy that solves so many hunts."""
    return scores("r", [Played(task=str(hunt), success=float(hunt < hunts)) for hunt in range(of)])


@pytest.mark.parametrize(("after", "expected"), [(64, False), (75, False), (10, False), (110, True), (250, True)])
def test_a_control_rose_if_it_did_so_by_more_than_chance(after, expected):
    """From 64 of 256 hunts; a fall is no rise."""
    assert rose(solving(64), solving(after)) is expected


def test_a_control_is_the_demo_with_shuffled_rewards_and_nothing_else():
    """What is shuffled follows from the demo's seed."""
    plain, control = (
        Recipe(shuffled=shuffled).run_toml("r", 3, Path("model"), Path("trainer")) for shuffled in (False, True)
    )

    assert control["algorithm"].pop("shuffle_seed") == 3
    assert control == plain
