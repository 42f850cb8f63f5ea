"""What steps were decided on, looked for in a log that says something else by now."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schemas.arbiter import Ruling
from schemas.decisions import StepDecided
from trainer.evidence import Change, Evidence
from trainer.terminal import Terminal


def ended(offset, group, sample, **changes):
    """Return the end of one of three siblings."""
    fields = {"digest": f"task of {group}", "content": f"bytes {offset}", "completed": True, "samples": 3}
    return Terminal(offset=offset, group=group, sample=sample, admission=None, **{**fields, **changes})


LOG = [
    ended(0, "a", 0),
    ended(1, "a", 1, completed=False),
    ended(2, "b", 0),
    ended(3, "a", 2),
    ended(4, "a", 2),  # once more
]


def changes(records, members=(LOG[0], LOG[3])):
    """Return what is no longer as a step found it that was decided on the first four records."""
    step = StepDecided(
        run="r",
        epoch=0,
        step=1,
        position=4,
        members=tuple(record.member for record in members),
        digest="",
        advantage_digest="",
        buffered=(),
    )
    evidence = Evidence()
    for record in records:
        evidence.add(record)
    return list(evidence.changes(step))


def altered(offset, **fields):
    """Return LOG with another record at an offset, or without one."""
    return [*LOG[:offset], *([replace(LOG[offset], **fields)] if fields else []), *LOG[offset + 1 :]]


def test_nothing_is_named_as_long_as_all_is_there():
    """Repeats and records of other groups count for nothing."""
    assert changes(LOG) == []
    assert Evidence().add(LOG[0]) is Ruling.ACCEPTED


@pytest.mark.parametrize(
    ("records", "sample", "says"),
    [
        (altered(3, content="other"), 2, "offset 3 had content bytes 3, it has other: its bytes were changed"),
        (altered(3, content="other", sample=1), 2, "it has other, as the end of a/1: its bytes were changed"),
        (altered(0), 0, "offset 0 cannot be read any more, or is another run's"),
        (altered(1), 1, "had ended before offset 4, and no record says so now"),
        (altered(1, sample=2), 2, "offset 3 no longer counts: offset 1 has the sample's first outcome"),
    ],
)
def test_the_sample_that_was_decided_on_is_named(records, sample, says):
    """By what it was then; of one that failed only its end is known."""
    first = changes(records)[0]

    assert (first.group, first.sample) == ("a", sample)
    assert says in first.what


def test_records_that_count_no_longer_because_of_another_one_are_named_with_it():
    """A failed sibling came first in its group, and now speaks of another task."""
    failed = ended(0, "a", 1, completed=False, digest="another task")
    graded = ended(1, "a", 0)

    what = "its record at offset 1 no longer counts: offset 0 came first and names another task"
    assert changes([failed, graded, LOG[3]], [graded])[0] == Change("a", 0, what)


def test_a_repeat_that_takes_another_name_changes_nothing():
    """Nobody decided on it."""
    assert changes(altered(4, group="c")) == []
