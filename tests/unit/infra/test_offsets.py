"""Progress on one partition when work completes out of order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infra.bus import Committed
from infra.offsets import Progress


def test_nothing_is_committed_before_anything_was_handed_out():
    """A partition that was only assigned keeps its committed offset."""
    assert Progress().committable() is None


def test_the_lowest_offset_in_flight_holds_the_commit_back():
    """Later offsets that are done do not pass an earlier one that is not."""
    progress = Progress()
    for offset in (5, 6, 7):
        progress.start(offset)
    progress.finish(6)
    progress.finish(7)

    assert Committed(5) == progress.committable()

    progress.finish(5)

    assert Committed(8) == progress.committable()


def test_a_gap_in_the_log_counts_as_done():
    """Offsets that were never handed out (compaction, markers) do not hold the commit back."""
    progress = Progress()
    progress.start(3)
    progress.start(9)
    progress.finish(3)

    assert Committed(9) == progress.committable()


def test_a_redelivered_offset_is_not_started_twice():
    """In flight, done above the commit, or committed: none of them is taken again."""
    progress = Progress()
    for offset in (0, 1, 2):
        assert progress.start(offset)
    progress.finish(0)
    progress.finish(2)
    progress.committable()

    assert [False, False, False] == [progress.start(offset) for offset in (0, 1, 2)]


@given(
    gaps=st.lists(st.integers(1, 3), min_size=1, max_size=60),
    order=st.randoms(use_true_random=False),
    stop=st.integers(0, 60),
)
def test_every_offset_is_committed_in_flight_or_done(gaps, order, stop):
    """At any moment a commit passes exactly the offsets before the first one that is not done."""
    offsets = []
    position = 0
    for gap in gaps:
        position += gap
        offsets.append(position)
    progress = Progress()
    for offset in offsets:
        progress.start(offset)
    finishing = list(offsets)
    order.shuffle(finishing)
    done = set()
    for offset in finishing[:stop]:
        progress.finish(offset)
        done.add(offset)
        committed = progress.committable().offset
        assert all(before in done for before in offsets if before < committed)
        assert committed == min((o for o in offsets if o not in done), default=offsets[-1] + 1)
