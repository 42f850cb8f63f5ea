"""Counts over sliding windows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infra.board.windows import LONGEST_MS, SLICE_MS, WINDOWS_MS, Windows
from schemas.telemetry import EventKind

NOW_MS = 1_700_000_000_000


@given(ages=st.lists(st.integers(0, 2 * LONGEST_MS), max_size=50), later_ms=st.integers(0, LONGEST_MS))
def test_a_window_shows_what_lies_in_it_and_at_most_a_slice_more(ages, later_ms):
    """Also when it is asked later."""
    windows = Windows()
    for age in ages:
        windows.add("run", EventKind.FINISHED, NOW_MS - age, NOW_MS)
    counts = windows.counts(NOW_MS + later_ms).get("run", {})

    for name, length_ms in WINDOWS_MS.items():
        reached = [age + later_ms for age in ages if age <= LONGEST_MS]
        inside = sum(age <= length_ms for age in reached)
        nearly = sum(age < length_ms + SLICE_MS for age in reached)
        assert inside <= counts.get(name, {}).get("finished", 0) <= nearly


def test_memory_is_a_number_per_slice_stage_and_kind():
    """However long it counts and however much."""
    windows = Windows()
    for at_ms in range(NOW_MS, NOW_MS + 3 * LONGEST_MS, SLICE_MS // 2):
        windows.add("run", EventKind.FINISHED, at_ms, at_ms)

    assert len(windows._slices) <= LONGEST_MS // SLICE_MS + 2
