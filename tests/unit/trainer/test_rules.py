"""Which complete groups are trained on, and how many make a step when too few do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paced_run import as_decided
from synthetic_log import START, end, failed, random_log, rules

from schemas.decisions import DropReason
from trainer.algorithm_config import Filter
from trainer.groups import Dropped, GroupAssembler, Script, Step
from trainer.rules import drawn


def assembler(script=None, **changes):
    return GroupAssembler(rules(**changes), START, script=script, versions=dict.fromkeys(range(100), 0))


def feed(machine, log):
    return [event for record in log for event in machine.feed(record)]


def pair(offset, group, first, second, **changes):
    """Return the records of a group of two."""
    return [end(offset, group, 0, first, **changes), end(offset + 1, group, 1, second, **changes)]


# ---- solved groups


def test_a_share_of_solved_groups_is_kept_and_it_follows_from_their_ids():
    """All siblings succeeded: they have no advantage and serve the KL term. Failed ones are never kept."""
    names = [f"a{number:04d}" for number in range(400)]
    log = [r for at, name in enumerate(names) for r in pair(2 * at, name, 1.0, 1.0, admission=at)]
    alike = [replace(r, success=0.5) for r in log]

    kept = {
        g.id
        for e in feed(assembler(groups=1, keep_solved=0.3, max_lag=999), log)
        if isinstance(e, Step)
        for g in e.groups
    }

    assert kept == {name for name in names if drawn(name) < 0.3}
    assert 80 < len(kept) < 160
    assert not [e for e in feed(assembler(groups=1, keep_solved=0.3, max_lag=999), alike) if isinstance(e, Step)]
    assert not [e for e in feed(assembler(groups=1), log) if isinstance(e, Step)]


def test_all_or_none_are_kept_at_the_ends_of_the_scale():
    """A draw lies in [0, 1)."""
    log = pair(0, "a", 1.0, 1.0)

    assert isinstance(feed(assembler(groups=1, keep_solved=1.0), log)[0], Step)
    assert all(0 <= drawn(f"g{n}") < 1 for n in range(100))


# ---- partial groups


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 3]))
def test_a_group_is_trained_on_if_enough_siblings_completed_and_not_before_all_have_ended(seed, needed):
    """By records alone: the last sibling's end decides, whatever it is."""
    log = random_log(seed)
    machine = assembler(siblings_needed=needed, filter=Filter.OFF, max_lag=99)
    ended = {}
    for record in log:
        for event in machine.feed(record):
            groups = event.groups if isinstance(event, Step) else (event.group,)
            for group in groups:
                assert len(group.completed) + group.excluded == 3
                assert (len(group.completed) >= needed) == isinstance(event, Step)
                assert ended.setdefault(group.id, event.position) == event.position


@pytest.mark.parametrize("asked", [1, 2, 3, 5])
def test_a_step_has_exactly_the_asked_number_of_groups(asked):
    """However many are complete."""
    steps = [
        e for e in feed(assembler(groups=asked, siblings_needed=1), random_log(3, groups=40)) if isinstance(e, Step)
    ]

    assert {(len(step.groups), step.missing) for step in steps} == {(asked, 0)}


# ---- too many groups without variance


DULL = [r for at, name in enumerate("bcd") for r in pair(2 + 2 * at, name, 0.0, 0.0)]


def test_after_too_many_dropped_groups_a_step_is_made_of_fewer_and_says_so():
    """At the record that ends the last of them; the count then begins anew."""
    log = [*pair(0, "a", 1.0, 0.0), *DULL, *pair(8, "e", 1.0, 0.0), *pair(10, "f", 0.0, 0.0)]

    events = feed(assembler(groups=3, most_dropped=3), log)

    assert [type(e) for e in events] == [Dropped, Dropped, Dropped, Step, Dropped]
    step = events[3]
    assert ([g.id for g in step.groups], step.missing, step.position) == (["a"], 2, 8)


def test_without_any_group_the_step_is_made_with_the_first_one_that_comes():
    """Nothing can be made of none."""
    events = feed(assembler(groups=3, most_dropped=2), [*DULL, *pair(8, "e", 1.0, 0.0)])

    assert [type(e) for e in events] == [Dropped, Dropped, Dropped, Step]
    assert events[-1].missing == 2


def test_no_step_is_short_where_the_run_does_not_say_so():
    """The default."""
    assert not [e for e in feed(assembler(groups=3), [*pair(0, "a", 1.0, 0.0), *DULL]) if isinstance(e, Step)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.data())
def test_a_run_with_short_steps_goes_on_the_same_from_anywhere(seed, data):
    """What was dropped since the last step is found again in the log."""
    log, draw = random_log(seed, groups=20), random.Random(seed)
    dull = {r.group for r in log if draw.random() < 0.5}
    log = [replace(r, success=0.0, sampled=((0, 3),)) if r.group in dull else r for r in log]
    changes = {"groups": 3, "siblings_needed": 2, "most_dropped": 2}
    whole = feed(assembler(**changes), log)

    machine, events, state, steps = assembler(**changes), [], START, 0
    for record in log[: data.draw(st.integers(0, len(log)), label="stop after")]:
        for event in machine.feed(record):
            events.append(event)
            if isinstance(event, Step) and data.draw(st.booleans(), label="checkpoint written"):
                state, steps = machine.state(), event.number
    script = Script(
        steps={e.number: as_decided(e) for e in events if isinstance(e, Step) and e.number > steps},
        drops={e.group.id: e.reason for e in events if isinstance(e, Dropped)},
    )
    successor = GroupAssembler(rules(**changes), state, script=script, versions=dict.fromkeys(range(100), 0))
    anew = [e for e in feed(successor, [r for r in log if r.offset >= state.low]) if not e.recorded]

    assert list(map(told, events + anew)) == list(map(told, whole))


def told(event):
    if isinstance(event, Step):
        return event.number, event.position, event.digest, event.missing
    return event.group.id, event.reason, event.position


def test_a_recorded_step_is_made_again_by_the_rules_of_the_trainer_that_decided_it():
    """Advantages too; later steps go by the new ones."""
    log = [*pair(0, "a", 1.0, 0.0), *pair(2, "b", 1.0, 0.0)]
    old, new = rules(groups=1, std=False), rules(groups=1, std=True)
    first, second = feed(GroupAssembler(old, START, versions={0: 0}), log)
    script = Script(steps={1: as_decided(first)}, rules={1: old})

    again, anew = feed(GroupAssembler(new, START, script=script, versions={0: 0}), log)

    assert again.advantage_digest == first.advantage_digest
    assert (anew.digest, anew.advantage_digest == second.advantage_digest) == (second.digest, False)


def test_of_several_reasons_the_first_that_nothing_could_change_is_given():
    """Too few siblings, then no variance, then age."""
    log = [*[failed(0, "a", 0), failed(1, "a", 1)], *pair(2, "b", 0.0, 0.0, sampled=((999, 1),))]
    log += pair(4, "c", 1.0, 0.0, sampled=((999, 1),))

    assert [e.reason for e in feed(assembler(), log)] == [
        DropReason.INCOMPLETE,
        DropReason.NO_VARIANCE,
        DropReason.STALE,
    ]
