"""Two policies on the same tasks: figures worked by hand, and what must hold for any outcome."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.evaluation import wilson
from trainer.paired import Better, compare, difference_of, mcnemar

SUCCESSES = st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4)
SUITES = st.dictionaries(st.integers(0, 12), SUCCESSES, max_size=12)


def singles(text):
    """Return a suite of one sample per task: `1` solved it, `0` did not, `?` is missing."""
    return {number: [None if sign == "?" else float(sign)] for number, sign in enumerate(text)}


@pytest.mark.parametrize(
    ("one", "other", "p"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),  # 2 * (1 + 6 + 15 + 20) / 64 is more than 1
        (1, 5, 14 / 64),  # 2 * (1 + 6) / 2^6
        (0, 5, 2 / 32),
        (2, 10, 158 / 4096),  # 2 * (1 + 12 + 66) / 2^12
        (0, 6, 2 / 64),
    ],
)
def test_mcnemar_is_counted_out(one, other, p):
    """Either way round: it is two-sided."""
    assert mcnemar(one, other) == mcnemar(other, one) == p


@given(st.integers(0, 12), st.integers(0, 12))
def test_mcnemar_is_the_share_of_coin_throws_that_are_as_uneven(one, other):
    """Against all throws, by their number."""
    n = one + other
    uneven = sum(math.comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= abs(one - other))

    assert mcnemar(one, other) == pytest.approx(uneven / 2**n)


def test_mcnemar_of_many_tasks_is_exact_too():
    """Where a float of 2^n is long out of range; the normal distribution says nearly the same."""
    z = (500 - 1) / math.sqrt(19_500)

    assert mcnemar(9_500, 10_000) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.01)


def test_tasks_are_compared_one_by_one():
    """Ten tasks: 4 that both solve, 3 that the second alone does, 1 that the first alone does, 2 that neither does."""
    found = compare(singles("1111000100"), singles("1111111000"))

    assert (found.tasks, found.pairs, found.second_better, found.first_better) == (10, 10, 3, 1)
    assert (found.first.success.value, found.second.success.value) == (0.5, 0.7)
    assert found.difference.value == pytest.approx(0.2)
    assert found.p == 10 / 16  # 2 * (1 + 4) / 2^4
    assert (found.better, found.incomplete) == (Better.NEITHER, False)


def test_what_both_do_alike_is_no_doubt():
    """Apart, 0.5 and 0.6 of 100 tasks have intervals that overlap; together the second loses nothing and wins ten."""
    found = compare(singles("1" * 50 + "0" * 50), singles("1" * 60 + "0" * 40))

    assert found.first.success.high > found.second.success.low
    assert found.difference.low > 0
    assert (found.p, found.better) == (2 / 1024, Better.SECOND)
    assert compare(singles("1" * 60 + "0" * 40), singles("1" * 50 + "0" * 50)).better is Better.FIRST


def test_a_bootstrap_keeps_the_two_sides_of_a_task_together():
    """Its interval is that of the mean of the tasks' differences: binomial quantiles where these are 0 and 1."""
    found = compare(singles("0" * 40), singles("1" * 10 + "0" * 30)).difference
    spread = 1.96 * math.sqrt(0.25 * 0.75 / 40)

    assert found.value == 0.25
    assert (found.low, found.high) == pytest.approx((0.25 - spread, 0.25 + spread), abs=0.03)


def test_samples_of_a_task_are_no_further_tasks():
    """A hundred samples for one say no more of which policy is better on other tasks."""
    few = compare({n: [0.0] for n in range(8)}, {n: [float(n < 4)] for n in range(8)})
    many = compare({n: [0.0] * 100 for n in range(8)}, {n: [float(n < 4)] * 100 for n in range(8)})

    assert (few.difference, few.p, few.second_better) == (many.difference, many.p, many.second_better)


def test_tasks_that_all_differ_alike_leave_room_for_doubt():
    """A bootstrap would be a point: up to 1 in 6 tasks may be unlike all 20 that were met (Wilson), and wholly so."""
    unseen = wilson(0, 20)[1]

    assert (difference_of([0.0] * 20).low, difference_of([0.0] * 20).high) == pytest.approx((-unseen, unseen))
    assert difference_of([1.0] * 20).high == 1.0
    assert difference_of([1.0] * 20).low == pytest.approx(1 - 2 * unseen)
    assert (difference_of([]).low, difference_of([]).high) == (-1.0, 1.0)


def test_missing_samples_are_in_the_bounds_alone():
    """Two tasks of two samples, one of which each policy lacks."""
    found = compare({"a": [1.0, None], "b": [0.0, 0.0]}, {"a": [1.0, 1.0], "b": [None, 1.0]})

    assert (found.first.missing, found.second.missing, found.first.samples) == (1, 1, 4)
    assert (found.first.success.value, found.second.success.value, found.difference.value) == (0.5, 1.0, 0.5)
    assert (found.first.worst, found.first.best, found.second.worst, found.second.best) == (0.25, 0.5, 0.75, 1.0)
    assert (found.worst, found.best) == (0.25, 0.75)


@pytest.mark.parametrize(("missing", "incomplete"), [(0, False), (2, False), (3, True)])
def test_over_two_percent_missing_on_either_side_says_nothing(missing, incomplete):
    """Exactly two percent are not too many; a large difference changes nothing."""
    whole, part = singles("0" * 100), singles("1" * (100 - missing) + "?" * missing)

    for found in (compare(whole, part), compare(part, whole)):
        assert found.incomplete is incomplete
        assert (found.better is Better.INCOMPLETE) is incomplete


def test_tasks_of_which_nothing_is_known_are_missing():
    """They may be any: the bounds allow for both ends."""
    found = compare(singles("1" * 9), singles("0" * 9), silent=(0, 1))

    assert (found.tasks, found.pairs, found.second.samples, found.second.missing) == (10, 9, 10, 1)
    assert (found.first.missing, found.incomplete) == (0, True)
    assert (found.worst, found.best) == (-1.0, pytest.approx(-0.8))


def test_only_tasks_of_both_count():
    """A task of another suite says nothing of who is better; without a common one nothing does."""
    found = compare({"a": [1.0], "b": [0.0]}, {"b": [1.0], "c": [0.0]})

    assert (found.tasks, found.first.success.value, found.second.success.value) == (1, 0.0, 1.0)
    assert compare({"a": [1.0]}, {"b": [1.0]}).better is Better.INCOMPLETE
    assert compare({}, {}).better is Better.INCOMPLETE


def test_pass_at_k_is_compared_task_by_task_too():
    """4 samples of which 1 succeeds: 1 - C(3, 2) / C(4, 2) = 1/2 for k = 2; of which 2 do: 1 - 1/6."""
    one, two = {n: [1.0, 0.0, 0.0, 0.0] for n in range(6)}, {n: [1.0, 1.0, 0.0, 0.0] for n in range(6)}
    found = compare(one, two)

    assert [e.value for e in found.first.pass_at] == pytest.approx([1 / 4, 1 / 2, 3 / 4, 1])
    assert [e.value for e in found.second.pass_at] == pytest.approx([1 / 2, 5 / 6, 1, 1])
    assert [e.value for e in found.pass_at] == pytest.approx([1 / 4, 1 / 3, 1 / 4, 0])


@settings(max_examples=40, deadline=None)
@given(SUITES, SUITES)
def test_figures_of_any_two_suites_stay_within_their_bounds(first, second):
    """And the other way round all is the same, with the sign turned."""
    found, turned = compare(first, second), compare(second, first)

    assert found.worst <= found.best
    assert -1 <= found.difference.low <= found.difference.value + 1e-9
    assert found.difference.value <= found.difference.high + 1e-9 <= 1 + 2e-9
    assert (found.p, found.incomplete, found.second_better) == (turned.p, turned.incomplete, turned.first_better)
    assert turned.difference.value == pytest.approx(-found.difference.value)
    assert (turned.worst, turned.best) == pytest.approx((-found.best, -found.worst))
    assert len(found.pass_at) == len(found.first.pass_at) == len(found.second.pass_at)


@settings(max_examples=40, deadline=None)
@given(SUITES, SUITES, st.randoms(use_true_random=False))
def test_whatever_the_missing_samples_are_the_difference_lies_between_the_bounds(first, second, draw):
    """Each may have failed or succeeded."""
    whole = [
        {task: [draw.random() if value is None else value for value in values] for task, values in suite.items()}
        for suite in (first, second)
    ]
    found, truth = compare(first, second), compare(*whole)

    assert found.worst - 1e-9 <= truth.second.worst - truth.first.worst <= found.best + 1e-9


def test_the_interval_of_a_difference_covers_it_nineteen_times_of_twenty():
    """Of 300 pairs of suites whose policies differ by 0.1 in the mean, over all tasks there could be."""
    draw, held = np.random.default_rng(3), 0
    for _ in range(300):
        hardness = draw.random(60)  # of a task, for both
        first, second = (draw.random(60) < hardness * scale for scale in (0.8, 1.0))
        found = difference_of([float(b) - float(a) for a, b in zip(first, second, strict=True)])
        held += found.low <= 0.1 <= found.high

    assert 0.91 < held / 300 < 0.99


def test_all_orders_of_tasks_give_the_same_figures():
    """A suite is a set: who came first in the log is luck, and an interval must not follow from it."""
    first = {n: [0.1 * n, None, 1.0] for n in range(5)}
    second = {n: [0.3 * (n % 3), 0.7] for n in range(5)}
    found = {compare(dict(order), second) for order in itertools.permutations(first.items())}

    assert len(found) == 1
