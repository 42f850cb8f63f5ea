"""The figures of a suite: worked by hand, and what must hold for any outcome."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.evaluation import Played, best, bootstrap, interval, scores, wilson

TASKS = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=5), min_size=1, max_size=20)


def suite(*tasks):
    """Return what was played: one list of successes per task, None for a missing sample."""
    return [
        Played(task=f"t{number}", success=success, turns=4, valid=3)
        for number, values in enumerate(tasks)
        for success in values
    ]


def test_success_is_a_mean_over_tasks_not_over_samples():
    """A task of which samples are missing weighs as much as the others."""
    found = scores("r", suite([1, 1, 1, 1], [0, None, None, None]))

    assert (found.success, found.tasks, found.samples, found.missing) == (0.5, 2, 8, 3)


def test_missing_samples_are_bounded_by_the_worst_and_the_best_that_they_could_have_been():
    """They are in no other figure."""
    found = scores("r", suite([1, 0], [1, None]))

    assert (found.worst, found.best) == (0.5, 0.75)
    assert (found.success, found.turns) == (0.75, 12)


@pytest.mark.parametrize(("missing", "incomplete"), [(0, False), (2, False), (3, True)])
def test_a_result_of_which_over_two_percent_is_missing_is_incomplete(missing, incomplete):
    """Exactly two percent are not."""
    tasks = [[None] if number < missing else [1.0] for number in range(100)]

    assert scores("r", suite(*tasks)).incomplete is incomplete


def test_a_suite_of_which_nothing_ended_is_incomplete_and_says_nothing():
    """No figure is made up: the interval is everything."""
    for found in (scores("r", suite([None], [None])), scores("r", [])):
        assert (found.incomplete, found.low, found.high, found.pass_at, found.pass_low) == (True, 0.0, 1.0, (), ())


def test_wilson_is_what_the_tables_say():
    """Agresti and Coull's examples: 0 of 10, 5 of 10; and an interval that stays inside 0 and 1."""
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(205, 256) == pytest.approx((0.7475, 0.8451), abs=1e-3)


def test_tasks_that_all_end_alike_leave_room_for_doubt():
    """A bootstrap of 20 successes would be the point 1."""
    assert interval([1.0] * 20) == wilson(20, 20)
    assert interval([1.0] * 20)[0] < 0.9


def test_more_samples_of_the_same_tasks_narrow_nothing():
    """What is uncertain is which tasks were met: the interval follows from the tasks' means alone."""
    few, many = [[0.0, 1.0]] * 6 + [[1.0, 1.0]] * 6, [[0.0, 1.0] * 50] * 6 + [[1.0, 1.0] * 50] * 6

    assert (scores("r", suite(*few)).low, scores("r", suite(*few)).high) == pytest.approx(
        (scores("r", suite(*many)).low, scores("r", suite(*many)).high)
    )


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_an_interval_holds_its_mean_and_is_the_same_again(values):
    """Nothing in it is drawn anew."""
    low, high = bootstrap(values)
    mean = sum(values) / len(values)

    assert low - 1e-9 <= mean <= high + 1e-9
    assert (low, high) == bootstrap(values)


@settings(max_examples=30)
@given(TASKS)
def test_pass_at_k_is_the_share_of_choices_that_hold_a_success(tasks):
    """Against all choices of k samples, counted out."""
    found = scores("r", suite(*tasks)).pass_at

    assert len(found) == max(map(len, tasks))
    for k, value in enumerate(found, 1):
        shares = []
        for samples in (one for one in tasks if len(one) >= k):
            chosen = list(itertools.combinations(samples, k))
            shares.append(sum(any(s >= 1 - 1e-6 for s in pick) for pick in chosen) / len(chosen))
        assert value == pytest.approx(sum(shares) / len(shares))


def test_pass_at_k_has_an_interval_over_tasks():
    """Eight tasks of two samples, of which four have one success: 1/4 for k = 1; for k = 2 four of eight, by Wilson."""
    found = scores("r", suite(*[[1.0, 0.0]] * 4, *[[0.0, 0.0]] * 4))

    assert found.pass_at == (0.25, 0.5)
    assert (found.pass_low[1], found.pass_high[1]) == wilson(4, 8)
    assert (found.pass_low[0], found.pass_high[0]) == bootstrap([0.5] * 4 + [0.0] * 4)


@settings(max_examples=30)
@given(TASKS)
def test_figures_stay_within_their_bounds(tasks):
    """Any success in any task."""
    found = scores("r", suite(*tasks))

    assert 0 <= found.low <= found.success + 1e-9
    assert found.success <= found.high + 1e-9
    assert found.worst == pytest.approx(found.best)
    assert 0 <= found.valid_low <= found.valid <= found.valid_high <= 1
    assert found.varied == sum(max(t) - min(t) > 1e-6 for t in tasks) / len(tasks)


def test_the_best_version_is_the_first_of_those_with_the_highest_success():
    """What came after it was no better; a result of which too much is missing is not compared."""

    def found(successes, missing=0):
        return scores("r", suite(*[[1.0]] * successes, *[[0.0]] * (10 - successes), *[[None]] * missing))

    assert best({0: found(2), 10: found(7), 20: found(7), 30: found(5), 40: found(9, missing=1)}) == 10
    assert best({0: found(2, missing=3)}) is None
    assert best({}) is None
