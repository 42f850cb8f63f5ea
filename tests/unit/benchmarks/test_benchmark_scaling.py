import pytest

from benchmarks.backlog import Span
from benchmarks.scaling import LONGEST_S, SIZES, waits, window_of


def test_the_window_closes_when_the_first_worker_has_taken_its_last_job():
    """From then on one worker may be idle, which is no fault of the others."""
    arrived, began = [0.0] * 12, [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]

    assert window_of(arrived, began, slots=2) == Span(0.0, 3.0)


def test_a_worker_that_was_done_before_a_full_load_waited_leaves_no_window():
    """A figure over fewer workers than it says would be worse than none."""
    with pytest.raises(ValueError, match="a worker was without work"):
        window_of([0.0, 0.0, 5.0, 5.0, 5.0], [[0.0], [0.0, 5.0, 6.0, 7.0]], slots=3)


def test_waits_are_skewed_bounded_and_the_same_for_the_same_seed():
    """Every size waits as the same draws say."""
    drawn = [payload["run_s"] for payload in waits(7, 1000)]

    assert drawn == [payload["run_s"] for payload in waits(7, 1000)]
    assert drawn != [payload["run_s"] for payload in waits(8, 1000)]
    assert 0 < min(drawn) < 0.5
    assert 2.0 < max(drawn) <= LONGEST_S


def test_each_size_adds_workers_to_the_one_before():
    """They are started in batches, and ended in the opposite order."""
    assert list(SIZES) == sorted(set(SIZES))
    assert SIZES[0] == 1
