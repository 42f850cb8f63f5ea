"""Ranges of offsets: every record in exactly one insert, however often the sink dies in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infra.bus import Committed, TopicPartition
from infra.clickhouse.ranges import PartitionBuffer, Want, intended

TP = TopicPartition("metrics", 0)
LIMITS = {"max_rows": 10, "max_bytes": 1000}


def fill(buffer: PartitionBuffer, offsets, *, now=0.0) -> None:
    for offset in offsets:
        if buffer.wants(offset) is Want.REWIND:
            assert buffer.wants(offset) is Want.TAKE, "what is ahead a second time follows a gap"
        if buffer.wants(offset) is Want.TAKE:
            buffer.add(offset, {"metrics": [(offset,)]}, 10, now)


def test_a_range_waits_for_company_but_not_for_ever():
    """Time closes a range that few rows came for."""
    buffer = PartitionBuffer(TP, Committed(5), wait_s=1.0)
    fill(buffer, [5, 6])
    assert buffer.due(0.9, **LIMITS) is None
    due = buffer.due(1.0, **LIMITS)
    assert (due.first, due.last, due.rows["metrics"]) == (5, 6, [(5,), (6,)])


def test_many_rows_close_a_range_at_once():
    """A full buffer does not wait."""
    buffer = PartitionBuffer(TP, Committed(0), wait_s=100.0)
    fill(buffer, range(10))
    assert buffer.due(0.0, **LIMITS).last == 9


def test_a_chosen_range_stays_chosen():
    """After a commit that may or may not have happened, the same range goes again, not a longer one."""
    buffer = PartitionBuffer(TP, Committed(0), wait_s=1.0)
    fill(buffer, [0, 1])
    first = buffer.due(2.0, **LIMITS)
    fill(buffer, [2, 3])
    assert first == buffer.due(9.0, **LIMITS)
    buffer.stored(first, 9.0)
    assert ((rest := buffer.due(20.0, **LIMITS)).first, rest.last) == (2, 3)


def test_an_intent_is_formed_again_exactly():
    """The successor waits for the end of the range and takes nothing more into it."""
    buffer = PartitionBuffer(TP, Committed(4, "rm1:7"), wait_s=0.0)
    fill(buffer, [4, 5, 6])
    assert buffer.due(100.0, draining=True, **LIMITS) is None
    fill(buffer, [7, 8, 9])
    due = buffer.due(100.0, **LIMITS)
    assert (due.token("sink", "metrics"), len(due.rows["metrics"])) == ("sink:metrics:metrics:0:4-7", 4)


def test_an_intended_end_that_left_the_log_does_not_block():
    """Offsets may have gaps: anything beyond the end completes the range."""
    buffer = PartitionBuffer(TP, Committed(4, "rm1:7"), wait_s=0.0)
    fill(buffer, [4, 9])
    due = buffer.due(0.0, **LIMITS)
    assert (due.first, due.last, due.rows["metrics"]) == (4, 7, [(4,)])


def test_records_without_rows_move_the_range_on():
    """Poison went elsewhere; its offset still counts as passed."""
    buffer = PartitionBuffer(TP, Committed(0), wait_s=0.0)
    buffer.add(0, {}, 5, 0.0)
    due = buffer.due(0.0, **LIMITS)
    assert ({}, Committed(1)) == (due.rows, due.done)


def test_records_from_before_a_rebalance_pass_nothing_over():
    """They arrive ahead of those that come again: the buffer goes back once and takes each in turn."""
    buffer = PartitionBuffer(TP, Committed(5), wait_s=0.0)
    assert [buffer.wants(offset) for offset in (7, 8, 9)] == [Want.REWIND, Want.SKIP, Want.SKIP]
    assert buffer.next_offset == 5
    fill(buffer, range(5, 10))
    assert buffer.due(0.0, **LIMITS).rows["metrics"] == [(offset,) for offset in range(5, 10)]


def test_foreign_metadata_is_no_intent():
    """Somebody else's text in the commit is ignored."""
    assert [intended(Committed(0, text)) for text in ("", "rm2:5", "rm1:x", "rm1:12")] == [None, None, None, 12]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["before intent", "before insert", "before done", ""]))))
def test_every_record_is_stored_exactly_once(steps):
    """The sink dies between any two of its steps; tokens make a repeated insert count once."""
    log_end, committed, stored = 0, Committed(0), {}
    buffer = PartitionBuffer(TP, committed, wait_s=0.0)
    for arrivals, death in [*steps, (1, ""), (0, "")]:
        log_end += arrivals
        fill(buffer, range(buffer.stored_to, log_end))
        due = buffer.due(0.0, **LIMITS)
        if due is not None and death != "before intent":
            committed = due.intent
            if death != "before insert":
                stored.setdefault(due.token("g", "metrics"), due.rows.get("metrics", []))
                if death != "before done":
                    committed = due.done
                    buffer.stored(due, 0.0)
        if death:
            buffer = PartitionBuffer(TP, committed, wait_s=0.0)
    offsets = [row[0] for rows in stored.values() for row in rows]
    assert list(range(log_end)) == sorted(offsets)
