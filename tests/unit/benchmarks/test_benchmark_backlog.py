import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.backlog import Span, backlog_window, busy_slots


def worked(arrived, waits, *, slots, pause=0.0):
    """Return when each job is worked on by slots that take the next one `pause` after the last."""
    free = [0.0] * slots
    jobs = []
    for at, wait in zip(arrived, waits, strict=True):
        start = max(at, heapq.heappop(free))
        jobs.append(Span(start, start + wait))
        heapq.heappush(free, start + wait + pause)
    return jobs


@given(st.lists(st.floats(0.01, 5.0), min_size=12, max_size=60), st.integers(1, 4))
def test_slots_that_never_pause_are_all_busy(waits, slots):
    """A bottleneck that is always busy reaches its bound exactly, however skewed the waits are."""
    jobs = worked([0.0] * len(waits), waits, slots=slots)

    window = backlog_window([0.0] * len(waits), [job.start for job in jobs], slots=slots)

    if window.length > 0:
        assert busy_slots(jobs, window) == pytest.approx(slots)


def test_the_time_between_two_jobs_is_lost():
    """A stage that needs a quarter of a second for each second of work has its slots busy for four fifths of it."""
    arrived, waits = [0.0] * 40, [1.0] * 40
    jobs = worked(arrived, waits, slots=2, pause=0.25)

    window = backlog_window(arrived, [job.start for job in jobs], slots=2)

    assert window == Span(0.0, 19 * 1.25)
    assert busy_slots(jobs, window) == pytest.approx(2 * 0.8)


def test_the_window_opens_when_a_full_load_waits_and_closes_with_the_last_one_taken():
    """Before, slots are empty for want of work; afterwards the stage drains."""
    arrived = [0.0, 1.0, 2.0, 2.5, 3.0]
    taken = [0.5, 1.5, 4.0, 5.0, 6.0]

    assert backlog_window(arrived, taken, slots=2) == Span(2.5, 6.0)


def test_a_job_counts_only_for_its_part_inside_the_window():
    """A job that began before or ends after the window is cut."""
    assert busy_slots([Span(0.0, 2.0), Span(3.0, 9.0), Span(20.0, 21.0)], Span(1.0, 5.0)) == pytest.approx(3 / 4)


def test_without_a_backlog_there_is_no_figure():
    """A stage that was never the bottleneck proves nothing: that is an error, not a number."""
    with pytest.raises(ValueError, match="never left 3 waiting: give the stage more work"):
        backlog_window([0.0, 1.0, 2.0], [0.1, 1.1, 2.1], slots=3)
