"""Who is left out, by family and length."""

from __future__ import annotations

from synthetic_log import end

from trainer.exclusion import ALARM_SAMPLES, UNKNOWN, Exclusion
from trainer.group import Group


def group(name, tokens, *, completed=4, excluded=0, family="doors"):
    ended = tuple(end(at, name, at, sampled=((0, tokens),)) for at in range(completed))
    return Group(id=name, admission=None, first=0, completed=ended, family=family, excluded=excluded)


def test_excluded_samples_are_counted_by_family_and_by_the_length_of_their_siblings():
    """A sample that failed has no tokens of its own."""
    left_out = Exclusion()
    for number in range(100):
        left_out.take(group(f"g{number}", 10 * number, excluded=4 if number >= 95 else 0))
    left_out.take(group("f", 5, family="boxes", excluded=1))
    left_out.take(group("n", 0, completed=0, excluded=4))

    places = left_out.by_place()
    assert places["boxes", "0"] == 0.2
    assert places["doors", UNKNOWN] == 1.0
    assert places["doors", "9"] > 0.05
    assert {length for family, length in places if family == "doors"} >= {"9", UNKNOWN}
    assert sum(share > 0 for place, share in places.items() if place[0] == "doors") == 2


def test_the_alarm_is_raised_once_when_the_share_exceeds_its_bound():
    """Not of a few samples; again after it was quiet."""
    left_out = Exclusion()
    for number in range(ALARM_SAMPLES // 5 - 1):
        left_out.take(group(f"g{number}", 10, completed=4, excluded=1))
    assert left_out.alarm() is None

    left_out.take(group("h", 10, completed=4, excluded=1))
    said = left_out.alarm()
    assert "20.0% of the last samples failed, expired or were cancelled" in said
    assert "family 'doors'" in said
    assert left_out.alarm() is None
    for number in range(1000):
        left_out.take(group(f"k{number}", 10))
    assert left_out.alarm() is None
    for number in range(1000):
        left_out.take(group(f"l{number}", 10, excluded=1))
    assert left_out.alarm() is not None


def test_late_groups_are_reported_by_family_and_length_once():
    """With the next step's metrics; what is not slow is not among them."""
    left_out = Exclusion()
    for number in range(20):
        left_out.take(group(f"g{number}", 10))
    left_out.take(group("slow", 500), late=True)

    points = left_out.points(at_ms=7, step=3)
    late = [(p.labels, p.value) for p in points if p.name == "trainer.groups_late"]
    assert late == [({"family": "doors", "length": "9"}, 1.0)]
    assert {p.step for p in points} == {3}
    assert "trainer.groups_late" not in {p.name for p in left_out.points(at_ms=8, step=4)}
