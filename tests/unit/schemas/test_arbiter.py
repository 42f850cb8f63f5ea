"""Which record of a sample counts: the first in the log, for every reader."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from schemas.arbiter import Arbiter, Ruling

RECORDS = st.lists(st.tuples(st.sampled_from(["g1", "g2"]), st.integers(0, 3), st.sampled_from(["d1", "d2"])))
"""(group, sample, digest) in the order of the log."""


def ruled(records: list[tuple[str, int, str]], arbiter: Arbiter) -> list[Ruling]:
    """Return the ruling of each record, its place in the list being its offset."""
    return [arbiter.rule(group, sample, digest, offset) for offset, (group, sample, digest) in enumerate(records)]


@given(records=RECORDS)
def test_exactly_one_record_of_a_sample_is_accepted(records):
    """Whatever attempts, zombies and redeliveries wrote, in any interleaving: one outcome, and it is the first."""
    own = {}
    for group, _, digest in records:
        own.setdefault(group, digest)
    expected = {}
    for offset, (group, sample, digest) in enumerate(records):
        if digest == own[group]:
            expected.setdefault((group, sample), offset)
    rulings = ruled(records, Arbiter())
    accepted = {records[offset][:2]: offset for offset, ruling in enumerate(rulings) if ruling is Ruling.ACCEPTED}
    assert Counter(rulings)[Ruling.ACCEPTED] == len(expected)
    assert accepted == expected


@given(records=RECORDS)
def test_another_task_under_the_same_id_is_a_conflict(records):
    """The digest of a group's first record is the group's; any other one never decides anything."""
    own = {}
    for (group, _, digest), ruling in zip(records, ruled(records, Arbiter()), strict=True):
        assert (ruling is Ruling.CONFLICT) == (own.setdefault(group, digest) != digest)


@given(records=RECORDS, data=st.data())
def test_records_fed_again_are_ruled_the_same(records, data):
    """A reader that starts over from an earlier offset comes to the same result."""
    arbiter = Arbiter()
    first = ruled(records, arbiter)
    start = data.draw(st.integers(0, len(records)))
    again = [arbiter.rule(*records[offset], offset) for offset in range(start, len(records))]
    assert again == first[start:]


@given(records=RECORDS)
def test_a_group_knows_its_accepted_records(records):
    """What a trainer assembles is what was ruled."""
    arbiter = Arbiter()
    rulings = ruled(records, arbiter)
    for name in ("g1", "g2"):
        assert arbiter.accepted(name) == {
            sample: offset
            for offset, (group, sample, _) in enumerate(records)
            if group == name and rulings[offset] is Ruling.ACCEPTED
        }


def test_an_unknown_group_has_no_accepted_records():
    """Asking about a group changes nothing."""
    arbiter = Arbiter()
    assert arbiter.accepted("nobody") == {}
    assert arbiter.rule("nobody", 0, "d", 9) is Ruling.ACCEPTED


def test_a_retry_after_the_outcome_is_superseded():
    """A second attempt that finished late is ignored, also when the first outcome was a failure."""
    arbiter = Arbiter()
    assert arbiter.rule("g", 0, "d", 4) is Ruling.ACCEPTED
    assert arbiter.rule("g", 0, "d", 9) is Ruling.SUPERSEDED
    assert arbiter.rule("g", 1, "d", 10) is Ruling.ACCEPTED
    assert arbiter.rule("g", 0, "other", 11) is Ruling.CONFLICT


@given(records=RECORDS)
def test_a_closed_group_accepts_nothing_more_and_still_knows_its_task(records):
    """What a forward reader forgets changes no ruling, once all siblings have ended."""
    rulings, arbiter, forgetful = [], Arbiter(), Arbiter()
    for offset, (group, sample, digest) in enumerate(records):
        expected = arbiter.rule(group, sample, digest, offset)
        rulings.append((forgetful.rule(group, sample, digest, offset), expected))
        if forgetful.ended(group) == 4:
            forgetful.close(group)
    assert all(found == expected for found, expected in rulings)


def test_closing_a_group_that_nobody_knows_changes_nothing():
    """There is nothing to forget."""
    arbiter = Arbiter()
    arbiter.close("g1")
    assert (0, Ruling.ACCEPTED) == (arbiter.ended("g1"), arbiter.rule("g1", 0, "d", 7))
