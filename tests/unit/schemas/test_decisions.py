"""Which decisions count when two trainers believe that they own a run: fencing by the order of the log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.decisions import TrainerStarted, VersionPublished, live_decisions

LOGS = st.lists(st.none() | st.integers(0, 12), max_size=12)
"""A log by offset: None is a TrainerStarted, a number is a decision of the trainer with that epoch."""


def log_of(epochs: list[int | None], start: int = 0) -> list:
    """Return (offset, decision) for each entry."""
    return [(offset, _decision(epoch, offset)) for offset, epoch in enumerate(epochs, start)]


def _decision(epoch: int | None, number: int):
    if epoch is None:
        return TrainerStarted(run="r", config={}, start=0, step=0)
    return VersionPublished(run="r", epoch=epoch, step=1, version=number, digest="")


@given(epochs=LOGS)
def test_a_decision_counts_if_the_last_trainer_made_it(epochs):
    """The epoch of a trainer is the offset of its start; a later start takes the run away from it."""
    log = log_of(epochs)
    live = list(live_decisions(log))
    for offset, epoch in enumerate(epochs):
        starts = [before for before in range(offset) if epochs[before] is None]
        counts = epoch is None or (bool(starts) and epoch == starts[-1])
        assert (log[offset] in live) == counts
    assert [offset for offset, _ in live] == sorted(offset for offset, _ in live)


def test_a_zombie_is_fenced():
    """The old trainer's decision after the new one's start changes nothing, and neither does its own later start."""
    log = log_of([None, 0, None, 0, 2, 0, 2])
    assert [offset for offset, _ in live_decisions(log)] == [0, 1, 2, 4, 6]


def test_a_decision_before_any_start_is_ignored():
    """A log whose beginning was lost to retention says nothing until the next start."""
    assert list(live_decisions(log_of([3, 3], start=4))) == []


def test_a_decision_that_the_log_holds_twice_counts_once():
    """A lost acknowledgement makes the producer send a record again; the repeat says nothing new."""
    start, decision = _decision(None, 0), _decision(0, 1)
    assert list(live_decisions([(0, start), (1, decision), (2, decision)])) == [(0, start), (1, decision)]
