"""When a run has collapsed: figures that a run goes back for, and such that it does not."""

from __future__ import annotations

import pytest

from trainer.collapse import collapse
from trainer.evaluation import Played, scores


def found(successes, *, valid=10, missing=0):
    """Return the figures of forty tasks of ten turns each."""
    played = [Played(task=f"t{n}", success=float(n < successes), turns=10, valid=valid) for n in range(40 - missing)]
    return scores("r", [*played, *(Played(task=f"m{n}") for n in range(missing))])


def judged(*evaluations, entropy=1.0, floor=None):
    return collapse({10 * n: each for n, each in enumerate(evaluations)}, entropy=entropy, floor=floor)


@pytest.mark.parametrize(
    ("successes", "collapsed"),
    [
        ([], False),
        ([30], False),
        ([30, 10], False),
        ([30, 10, 10], True),
        ([30, 10, 25, 10], False),
        ([30, 24, 24], False),
        ([30, 23, 23], True),
        ([10, 9, 30, 31, 12, 8], True),
    ],
)
def test_success_below_the_best_by_more_than_its_interval_twice_in_a_row_is_a_collapse(successes, collapsed):
    """30 of 40 have an interval down to 0.598: 24 are inside. One bad evaluation proves nothing."""
    assert bool(judged(*map(found, successes))) is collapsed


def test_incomplete_results_are_not_compared():
    """Neither as the best one, nor as one of the two; they do not come between two either."""
    few = {"missing": 5}
    assert not judged(found(35, **few), found(10), found(10))
    assert not judged(found(30), found(10), found(5, **few))
    assert judged(found(30), found(10), found(5, **few), found(10))


def test_a_format_that_is_gone_is_a_collapse_at_once():
    """If the best version had it: a run that was begun by force is not judged by it."""
    assert "at most 74.3% of the turns are allowed actions" in judged(found(30), found(28, valid=7))
    assert not judged(found(30), found(28, valid=8))
    assert not judged(found(30, valid=7), found(28, valid=7))


@pytest.mark.parametrize(("entropy", "floor", "collapsed"), [(0.04, 0.1, True), (0.06, 0.1, False), (0.0, None, False)])
def test_entropy_far_below_its_soft_floor_is_a_collapse_at_once(entropy, floor, collapsed):
    """Just below it the loss pulls, and is given time."""
    assert bool(judged(found(30), found(30), entropy=entropy, floor=floor)) is collapsed


def test_the_reason_names_figures_and_bound():
    """A person can follow it."""
    assert judged(found(30), found(10), found(8)) == (
        "success of 0.250 and 0.200, below 0.750 of step 0 by more than its interval (0.598)"
    )
