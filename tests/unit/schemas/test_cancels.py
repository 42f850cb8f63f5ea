"""Which samples are withdrawn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.cancels import Cancels, targets
from schemas.control import Cancel

NAMES = st.sampled_from(["a", "b", "a/b", "1"])
"""Few names, so that targets meet samples; foreign producers may use a `/`."""

SAMPLES = st.tuples(NAMES, NAMES, st.integers(0, 2))
TARGETS = SAMPLES.flatmap(lambda sample: st.sampled_from(targets(*sample)))
CHANGES = st.lists(st.tuples(TARGETS, st.booleans()), max_size=20)


@given(changes=CHANGES, sample=SAMPLES)
def test_a_sample_is_withdrawn_exactly_when_a_record_in_force_names_it_or_what_it_belongs_to(changes, sample):
    """Whatever was withdrawn and removed before; the cause is that of the narrowest record."""
    cancels, in_force = Cancels(), {}
    for number, (target, put) in enumerate(changes):
        record = Cancel(target=target, cause=f"cause {number}") if put else None
        cancels.put(target, record)
        in_force.pop(target, None)
        if record is not None:
            in_force[target] = record
    run, group, number = sample
    covering = [in_force[name] for name in (f"{run}/{group}/{number}", f"{run}/{group}", run) if name in in_force]

    assert cancels.of(*sample) == (covering[0] if covering else None)
    assert (len(cancels), set(cancels)) == (len(in_force), set(in_force))


def test_siblings_and_other_runs_are_not_withdrawn():
    """Names are compared whole, not by their beginnings."""
    cancels = Cancels([Cancel(target="r/g/1", cause="a"), Cancel(target="r2", cause="b")])

    assert [None, "a", None, None] == [
        found and found.cause
        for found in (
            cancels.of("r", "g", 0),
            cancels.of("r", "g", 1),
            cancels.of("r", "g", 10),
            cancels.of("r", "r2", 0),
        )
    ]
    assert cancels.of("r2", "anything", 7) is cancels.get("r2")
