"""Groups of siblings are a pure function of the log: each outcome once, each group once, the same after any restart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.arbiter import Arbiter, Ruling
from schemas.grouping import Grouping
from schemas.messages import Trajectory
from schemas.outcome import Completed, Expired
from tests.logs import make_task

DONE = Completed(components={}, reward=1.0, success=1.0, truncated=False)
LATE = Expired(cause="time is up")
SIZES = {"g1": 1, "g2": 2, "g3": 3}


def end(group, sample, digest="d1", *, graded=True, attempt=0):
    """Return the terminal record of a sample; a group of another name has two siblings."""
    size = SIZES.get(group, 2)
    task = make_task(group=group, sample=sample, samples=size, attempt=attempt, payload_digest=digest)
    return Trajectory(task=task, outcome=DONE if graded else LATE, stage="eval")


ENDS = st.builds(
    lambda group, sample, digest, graded, attempt: end(
        group, sample % SIZES[group], digest, graded=graded, attempt=attempt
    ),
    st.sampled_from(sorted(SIZES)),
    st.integers(0, 2),
    st.sampled_from(["d1", "d1", "d2"]),
    st.booleans(),
    st.integers(0, 1),
)
LOGS = st.lists(ENDS, max_size=30)
"""Duplicates, later attempts, late first ones and foreign tasks under the same id, in any interleaving."""

ENOUGH = st.sampled_from([None, 1, 2])


def fed(records, grouping, offset=0):
    """Feed a log whose records begin at an offset; return what each meant and the groups handed out."""
    found = [grouping.feed(at, record) for at, record in enumerate(records, offset)]
    return [ruling for ruling, _ in found], [group for _, group in found if group is not None]


def ruled(records):
    """Return what the arbiter alone says."""
    arbiter = Arbiter()
    return [
        arbiter.rule(record.task.group, record.task.sample, record.task.payload_digest, offset)
        for offset, record in enumerate(records)
    ]


@given(records=LOGS, enough=ENOUGH)
def test_every_record_is_ruled_as_the_arbiter_rules(records, enough):
    """Whatever is forgotten of groups that are over."""
    rulings, _ = fed(records, Grouping(0, enough=enough))

    assert ruled(records) == rulings


@given(records=LOGS)
def test_a_group_holds_each_siblings_accepted_outcome_once_all_have_ended(records):
    """And only then, and once; by sample number, whatever the order of the log."""
    _, groups = fed(records, Grouping(0))
    accepted = {}
    for offset, ruling in enumerate(ruled(records)):
        if ruling is Ruling.ACCEPTED:
            task = records[offset].task
            accepted.setdefault(task.group, {})[task.sample] = offset
    expected = {
        name: [offsets[sample] for sample in sorted(offsets)]
        for name, offsets in accepted.items()
        if len(offsets) == SIZES[name]
    }

    assert expected == {group.id: list(group.offsets) for group in groups}
    for group in groups:
        assert [records[offset] for offset in group.offsets] == list(group.samples)
        assert (True, max(group.offsets) + 1) == (group.complete, group.position)
        assert (*group.graded, *group.failed) == tuple(sorted(group.samples, key=lambda one: one.outcome != DONE))


@given(records=LOGS, enough=st.integers(1, 3))
def test_enough_siblings_hand_a_group_out_once_and_the_rest_is_late(records, enough):
    """The first offset with so many graded siblings, or with all ended: no clock, and no sibling is in it twice."""
    grouping = Grouping(0, enough=enough)
    rulings, groups = fed(records, grouping)
    names = [group.id for group in groups]

    assert len(names) == len(set(names))
    for group in groups:
        assert len(group.graded) == enough or (group.complete and len(group.graded) <= enough)
        assert len({one.task.sample for one in group.samples}) == len(group.samples) <= group.expected
    handed_out = sum(len(group.samples) for group in groups)
    waiting = sum(
        ruling is Ruling.ACCEPTED and records[offset].task.group not in names for offset, ruling in enumerate(rulings)
    )
    assert handed_out + waiting + grouping.late == rulings.count(Ruling.ACCEPTED)


@given(records=LOGS, enough=ENOUGH, data=st.data())
def test_a_log_fed_again_hands_out_the_same_groups_at_the_same_positions(records, enough, data):
    """So one position says what was handed out: a restart there neither repeats a group nor loses one."""
    _, groups = fed(records, Grouping(0, enough=enough))
    position = data.draw(st.integers(0, len(records)))
    again = Grouping(0, enough=enough)
    _, before = fed(records[:position], again)
    _, after = fed(records[position:], again, position)

    assert groups == before + after
    assert all(group.position <= position for group in before)
    assert all(group.position > position for group in after)


@given(records=LOGS, enough=ENOUGH)
def test_nothing_that_a_later_group_needs_lies_before_low(records, enough):
    """What is below it may go: every group that comes after has its records there or behind."""
    grouping = Grouping(0, enough=enough)
    lows, groups = [], []
    for offset, record in enumerate(records):
        _, group = grouping.feed(offset, record)
        groups += [group] if group is not None else []
        lows.append((offset + 1, grouping.low))

    for position, low in lows:
        assert low <= position
        assert all(min(group.offsets) >= low for group in groups if group.position > position)
    assert [group.low for group in groups] == [dict(lows)[group.position] for group in groups]


def test_bodies_are_kept_for_open_groups_only():
    """A run of any length needs memory for what is open."""
    grouping, most = Grouping(0), 0
    for number in range(300):
        _, first = grouping.feed(2 * number, end(f"n{number}", 0))
        most = max(most, grouping.open_groups)
        _, group = grouping.feed(2 * number + 1, end(f"n{number}", 1))
        assert (None, 2) == (first, len(group.samples))

    assert (1, 0) == (most, grouping.open_groups)


def test_a_record_is_fed_once_and_in_order():
    """Going back would count something twice."""
    grouping = Grouping(5)
    grouping.feed(5, end("g2", 0))
    with pytest.raises(ValueError, match="offset 5 after position 6"):
        grouping.feed(5, end("g2", 1))


def test_offsets_that_hold_nothing_of_the_run_are_passed():
    """Other runs share the partition."""
    grouping = Grouping(5)
    grouping.pass_to(9)

    assert (9, 9) == (grouping.position, grouping.low)
