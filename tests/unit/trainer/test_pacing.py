"""No trained token lags too much where steps wait for late groups, and no step waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paced_run import PacedRun, as_decided
from synthetic_log import START, end, failed, rules

from schemas.decisions import DropReason
from trainer.algorithm_config import Late
from trainer.groups import AssemblerState, Dropped, GroupAssembler, Script, Step
from trainer.pacing import Pacing, PacingState

SHAPES = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([0, 1, 2, 8]))
"""(groups in a step, max_lag)."""


def pacing(*given, seen=0, lowest=0):
    return Pacing(PacingState(lowest=lowest, seen=seen, given=given))


# ---- the rule


def test_a_step_waits_for_a_group_that_would_otherwise_be_used_too_late():
    """max_lag 1, two groups a step: 0 and 1 were let out before step 1; after step 2 without them they are too old."""
    numbers = pacing((0, 4), (1, 6), seen=6)
    for used in (2, 3):
        numbers.decide(used)

    wait = numbers.must_wait(2, {4, 5}, {4, 5}, groups=2, max_lag=1, foreign=False)
    assert wait
    assert not numbers.must_wait(2, {0, 1}, {0, 1, 4, 5}, groups=2, max_lag=1, foreign=False)


def test_a_step_waits_early_enough_for_more_groups_than_one_step_can_use():
    """max_lag 2, one group a step: 0 and 1 need two steps, 2 and 3, so step 2 may not be made of group 3."""
    numbers = pacing((0, 3), (1, 4), seen=4)
    numbers.decide(2)

    assert numbers.must_wait(2, {3}, {3}, groups=1, max_lag=2, foreign=False)
    assert not numbers.must_wait(2, {0}, {0, 3}, groups=1, max_lag=2, foreign=False)


def test_nobody_waits_for_numbers_that_were_never_met():
    """The source may have ended: only what an accepted record shows to be in the log is waited for."""
    numbers = pacing((0, 4), seen=2)

    assert not numbers.must_wait(9, {1}, {0, 1}, groups=2, max_lag=1, foreign=False)


def test_a_step_of_foreign_groups_waits_for_every_started_group_that_it_would_make_too_old():
    """They come after all numbered ones; before any group is met there is nothing to wait for."""
    assert pacing((0, 2), seen=1).must_wait(1, set(), set(), groups=2, max_lag=0, foreign=True)
    assert not pacing((0, 2), seen=0).must_wait(1, set(), set(), groups=2, max_lag=0, foreign=True)


def test_what_is_remembered_is_as_long_as_what_is_on_its_way():
    """A long run costs a few numbers."""
    numbers = pacing()
    for steps in range(500):
        numbers.give(steps, 2 * steps + 4)
        for used in (2 * steps, 2 * steps + 1):
            numbers.meet(used)
            numbers.decide(used)

    state = numbers.state()
    assert (state.lowest, state.seen, state.decided) == (1000, 1000, ())
    assert len(state.given) == 1
    assert Pacing(state).state() == state


# ---- runs


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), SHAPES, st.sampled_from([0.0, 0.2, 0.6]))
def test_no_token_of_a_paced_run_lags_more_than_it_may_and_the_run_uses_its_source(seed, shape, stragglers):
    """In any order of ends, with dull, lost and very slow groups: all are decided but for less than one step's."""
    groups, max_lag = shape
    run = PacedRun(seed, groups=groups, max_lag=max_lag, source=24).run(stragglers=stragglers)

    assert max(run.lags, default=0) <= max_lag
    assert run.admitted == run.source
    assert run.machine.kept < groups
    assert not [drop for drop in run.drops if drop.reason is DropReason.STALE]
    assert all(len(step.groups) == groups for step in run.steps)


def test_the_same_runs_lose_groups_to_their_lag_where_nothing_waits():
    """So the runs above show something."""
    runs = [PacedRun(seed, groups=2, max_lag=1, source=24, late=Late.MASK).run(stragglers=0.6) for seed in range(10)]

    assert [drop for run in runs for drop in run.drops if drop.reason is DropReason.STALE]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), SHAPES)
def test_foreign_groups_between_them_hold_nothing_up(seed, shape):
    """They have no number; the numbered ones still are in time once they are known to have started."""
    groups, max_lag = shape
    run = PacedRun(seed, groups=groups, max_lag=max_lag, source=16, foreign=0.3).run(stragglers=0.3)

    assert run.admitted == run.source
    assert run.machine.kept < groups


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), SHAPES, st.sampled_from([0.0, 0.3, 0.6]), st.data())
def test_a_run_that_waits_goes_on_the_same_from_any_checkpoint(seed, shape, foreign, data):
    """Numbers on their way are part of the state; held steps are made again at the position where they were made."""
    groups, max_lag = shape
    run = PacedRun(seed, groups=groups, max_lag=max_lag, source=20, foreign=foreign).run(stragglers=0.4)
    known = [told(event) for event in run.events]
    at = data.draw(st.integers(0, len(run.log)), label="stop after")

    machine, events, state, steps = GroupAssembler(run.rules, START, versions=run.machine.versions), [], START, 0
    for record in run.log[:at]:
        for event in decided(machine, record):
            events.append(event)
            if isinstance(event, Step) and data.draw(st.booleans(), label="checkpoint written"):
                state, steps = machine.state(), event.number
    script = Script(
        steps={e.number: as_decided(e) for e in events if isinstance(e, Step) and e.number > steps},
        drops={e.group.id: e.reason for e in events if isinstance(e, Dropped)},
    )
    successor = GroupAssembler(run.rules, state, script=script, versions=run.machine.versions)
    again = [e for record in run.log if record.offset >= state.low for e in decided(successor, record)]

    assert [told(e) for e in events + [e for e in again if not e.recorded]] == known
    assert successor.state() == run.machine.state()


def decided(machine, record):
    """Yield each event, and go on when it was acted upon."""
    yield from machine.feed(record)
    while events := machine.due():
        yield from events


def told(event):
    if isinstance(event, Step):
        return event.number, event.position, event.digest
    return event.group.id, event.reason, event.position


def test_a_group_that_is_dropped_lets_the_step_go_that_waited_for_it():
    """The straggler expires: its group is incomplete, and the step is made at that record."""
    machine = GroupAssembler(rules(groups=1, max_lag=0, late=Late.WAIT), START, versions={0: 0})
    held = [end(0, "x", 0, 1.0, admission=None), end(1, "a", 0, 1.0), end(2, "x", 1, admission=None)]

    assert [machine.feed(record) for record in held] == [[], [], []]
    dropped, step = machine.feed(failed(3, "a", 1))
    assert (dropped.reason, [g.id for g in step.groups]) == (DropReason.INCOMPLETE, ["x"])


def test_several_steps_may_become_due_at_one_record():
    """Both were held for group a; each is made before the next one is asked for."""
    machine = GroupAssembler(rules(groups=1, max_lag=0, late=Late.WAIT), START, versions={0: 0, 1: 1, 2: 2})
    log = [
        end(0, "a", 0, 1.0),
        *(end(1, "x", 0, 1.0, admission=None), end(2, "x", 1, admission=None)),
        *(end(3, "y", 0, 1.0, admission=None), end(4, "y", 1, admission=None)),
    ]
    assert [machine.feed(record) for record in log] == [[]] * 5

    (first,) = machine.feed(end(5, "a", 1))
    (second,) = machine.due()
    (third,) = machine.due()

    assert [[g.id for g in step.groups] for step in (first, second, third)] == [["a"], ["x"], ["y"]]
    assert {first.position, second.position, third.position} == {6}
    assert machine.due() == []


def test_where_nothing_waits_no_step_is_due_without_a_record():
    """Runs recorded by older trainers replay as they were."""
    machine = GroupAssembler(rules(groups=2), START, versions={0: 0})
    for offset, (group, sample) in enumerate([("a", 0), ("a", 1), ("b", 0)]):
        machine.feed(end(offset, group, sample, float(sample)))
    machine.rules = rules(groups=1)

    assert machine.due() == []


def test_of_a_checkpoint_that_counted_no_numbers_nothing_is_waited_for():
    """An older trainer wrote it: what it had let out is unknown; what is let out from here on is waited for again."""
    old = AssemblerState(low=0, position=0, steps=4, resolved=4)
    machine = GroupAssembler(rules(groups=1, max_lag=0, late=Late.WAIT), old, versions={4: 4, 5: 5})
    fresh, waiting = {"sampled": ((4, 1),), "admission": 4}, {"sampled": ((5, 1),), "admission": 5}

    assert machine.feed(end(0, "x", 0, 1.0, admission=None, sampled=((4, 1),))) == []
    assert machine.feed(end(1, "a", 0, 1.0, **fresh)) == []
    (step,) = machine.feed(end(2, "x", 1, admission=None, sampled=((4, 1),)))
    assert step.number == 5
    machine.feed(end(3, "a", 1, 0.0, admission=4))
    machine.feed(end(4, "b", 0, 1.0, **waiting))
    machine.feed(end(5, "y", 0, 1.0, admission=None, sampled=((5, 1),)))
    assert machine.feed(end(6, "y", 1, admission=None, sampled=((5, 1),))) == []


@pytest.mark.parametrize("late", [Late.MASK, Late.DROP])
def test_a_group_with_some_late_tokens_is_kept_or_dropped_as_the_run_says(late):
    """Masked ones stay in the baseline; dropped ones have a reason of their own."""
    machine = GroupAssembler(rules(groups=1, max_lag=0, late=late), START, versions={0: 0, 1: 1})
    log = [
        *(end(0, "a", 0, 1.0), end(1, "a", 1)),
        *(end(2, "b", 0, 1.0, sampled=((0, 5), (1, 1))), end(3, "b", 1, sampled=((1, 2),))),
        *(end(4, "c", 0, 1.0, sampled=((0, 5),)), end(5, "c", 1, sampled=((0, 2),))),
    ]

    events = [event for record in log for event in machine.feed(record)]

    # With `mask` group b is step 2, after which everything of c is older still.
    last = DropReason.STALE if late is Late.MASK else DropReason.LATE
    expected = [Step, Step, DropReason.STALE] if late is Late.MASK else [Step, DropReason.LATE, last]
    assert [event.reason if isinstance(event, Dropped) else Step for event in events] == expected
