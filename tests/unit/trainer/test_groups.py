from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paced_run import as_decided
from synthetic_log import START, end, failed, random_log, rules

from schemas.decisions import DropReason
from trainer.algorithm_config import Filter
from trainer.groups import Dropped, GroupAssembler, Script, ScriptBroken, Step
from trainer.terminal import OTHER_RUN


def assembler(state=START, script=None, versions=None, **changes):
    return GroupAssembler(rules(**changes), state, script=script, versions={0: 0} if versions is None else versions)


def feed(assembler, records):
    return [event for record in records for event in assembler.feed(record)]


def summary(event):
    """Return what must be the same whenever the same decision is made."""
    if isinstance(event, Step):
        return (event.number, event.position, event.digest, event.advantage_digest, event.buffered)
    return (event.group.id, event.reason, event.position, tuple(t.ref for t in event.group.completed))


# ---- what a step is made of


def test_a_step_is_decided_with_the_record_that_completes_its_last_group():
    """Not before, and at the position behind that record."""
    log = [end(0, "a", 0, 1.0), end(3, "b", 0, 1.0), end(4, "a", 1), end(9, "b", 1)]

    events = list(map(assembler().feed, log))

    assert [len(e) for e in events] == [0, 0, 0, 1]
    step = events[-1][0]
    assert (step.number, step.position) == (1, 10)


def test_groups_are_sorted_by_admission_and_samples_by_number():
    """The order in which siblings ended does not matter."""
    log = [end(0, "b", 1, 1.0), end(1, "b", 0), end(2, "a", 1), end(3, "a", 0, 1.0)]

    (step,) = feed(assembler(), log)

    assert [(m.group, m.sample) for m in step.members] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_groups_of_foreign_producers_come_last_by_first_offset():
    """They have no admission number."""
    log = [
        end(0, "x", 0, 1.0, admission=None),
        end(1, "b", 0, 1.0),
        end(2, "w", 0, 1.0, admission=None),
        end(3, "w", 1, admission=None),
        end(4, "b", 1),
        end(5, "x", 1, admission=None),
    ]

    (step,) = feed(assembler(groups=3), log)

    assert [group.id for group in step.groups] == ["b", "x", "w"]


def test_advantages_are_those_of_each_group_in_the_members_order():
    """One per sample."""
    (step,) = feed(assembler(std=False), [end(0, "b", 0, 1.0), end(1, "b", 1), end(2, "a", 0), end(3, "a", 1, 1.0)])

    assert [float(a) for a in step.advantages] == [-0.5, 0.5, 0.5, -0.5]


def test_process_rewards_give_each_turn_its_advantage_and_a_digest_of_its_own():
    """Returns-to-go (1, 0) and (0): mean 1/3; the outcome adds +-1/2."""
    plain = [end(0, "a", 0, 1.0, turns=2), end(1, "a", 1, turns=1)]
    milestone = [replace(plain[0], turn_rewards=(1.0, 0.0)), plain[1]]

    (before,), (step,) = (feed(assembler(groups=1, std=False), log) for log in (plain, milestone))

    assert [[round(float(v), 4) for v in a] for a in step.advantages] == [[1.1667, 0.1667], [-0.8333]]
    assert step.advantage_digest != before.advantage_digest


def test_what_was_read_and_not_used_is_listed_by_offset():
    """No disposition is a remainder."""
    log = [end(0, "c", 1), end(1, "a", 0, 1.0), failed(2, "d", 0), end(3, "a", 1), end(4, "b", 0, 1.0), end(5, "b", 1)]

    (step,) = feed(assembler(), log)

    assert [(ref.group, ref.sample, ref.offset) for ref in step.buffered] == [("c", 1, 0)]


# ---- which groups are kept


@pytest.mark.parametrize("success", [0.0, 1.0, 0.5])
def test_a_group_without_variance_is_dropped(success):
    """All siblings succeeded alike."""
    (event,) = feed(assembler(), [end(0, "a", 0, success), end(1, "a", 1, success)])

    assert (event.reason, event.group.id, event.position) == (DropReason.NO_VARIANCE, "a", 2)


def test_the_filter_may_look_at_the_shaped_reward_or_at_nothing():
    """Equal success, different reward: kept by `reward`, and anything is by `off`."""
    log = [end(0, "a", 0, 1.0, reward=0.9), end(1, "a", 1, 1.0, reward=1.0)]

    assert feed(assembler(groups=1, filter=Filter.SUCCESS), log)[0].reason is DropReason.NO_VARIANCE
    assert isinstance(feed(assembler(groups=1, filter=Filter.REWARD), log)[0], Step)
    flat = [end(0, "a", 0), end(1, "a", 1)]
    assert isinstance(feed(assembler(groups=1, filter=Filter.OFF), flat)[0], Step)


def test_fractional_success_counts_as_variance():
    """Success need not be 0 or 1."""
    assert isinstance(feed(assembler(groups=1), [end(0, "a", 0, 0.5), end(1, "a", 1, 0.6)])[0], Step)


def test_failed_siblings_are_outside_test_and_baseline():
    """Three siblings, one failed: the group is judged by the other two, if two are enough."""
    log = [end(0, "a", 0, 1.0, samples=3), failed(1, "a", 1, samples=3), end(2, "a", 2, samples=3)]

    (step,) = feed(assembler(groups=1, siblings_needed=2, std=False), log)
    assert [m.sample for m in step.members] == [0, 2]
    assert [float(a) for a in step.advantages] == [0.5, -0.5]
    assert step.groups[0].excluded == 1

    (dropped,) = feed(assembler(groups=1, siblings_needed=3), log)
    assert dropped.reason is DropReason.INCOMPLETE
    assert [t.sample for t in dropped.group.completed] == [0, 2]


def test_a_group_none_of_whose_tokens_is_young_enough_is_stale():
    """Version 0 is two steps old when the third step is collected, and one step is allowed."""
    machine = assembler(groups=1, versions={0: 0, 1: 1, 2: 2})
    log = [
        *(end(0, "a", 0, 1.0), end(1, "a", 1)),
        *(end(2, "b", 0, 1.0), end(3, "b", 1)),
        *(end(4, "c", 0, 1.0), end(5, "c", 1)),
        *(end(6, "d", 0, 1.0, sampled=((0, 5), (1, 1))), end(7, "d", 1)),
    ]

    events = feed(machine, log)

    assert [type(e) for e in events] == [Step, Step, Dropped, Step]
    assert events[2].reason is DropReason.STALE


def test_a_version_that_no_decision_names_is_too_old():
    """Its lag is unknown, so its tokens are not trained on."""
    (event,) = feed(assembler(groups=1, versions={}), [end(0, "a", 0, 1.0), end(1, "a", 1)])

    assert event.reason is DropReason.STALE


# ---- which record counts


def test_the_first_record_of_a_sample_counts_and_a_late_one_changes_nothing():
    """A second attempt with another reward is ignored, before and after its group is decided."""
    log = [end(0, "a", 0, 1.0), end(1, "a", 0, 0.0), end(2, "a", 1, 0.0), end(3, "a", 1, 1.0)]

    (step,) = feed(assembler(groups=1), log)

    assert [(m.offset, m.reward) for m in step.members] == [(0, 1.0), (2, 0.0)]


def test_a_record_of_another_task_under_the_same_id_is_ignored():
    """The digest of the first record is the group's."""
    log = [end(0, "a", 0, 1.0), end(1, "a", 1, 1.0, digest="other"), end(2, "a", 1)]

    (step,) = feed(assembler(groups=1), log)

    assert [m.offset for m in step.members] == [0, 2]


def test_records_must_come_in_offset_order():
    """Anything else is a bug of the caller."""
    machine = assembler()
    machine.feed(end(5, "a", 0))

    with pytest.raises(ValueError, match="offset order"):
        machine.feed(end(4, "a", 1))


def test_only_groups_of_the_feeder_count_as_resolved():
    """Foreign groups are not paced by credit."""
    machine = assembler(groups=1)

    feed(machine, [end(0, "a", 0), end(1, "a", 1), end(2, "x", 0, admission=None), end(3, "x", 1, admission=None)])

    assert machine.resolved == 1


# ---- going on


def test_the_state_names_the_lowest_record_of_an_undecided_group():
    """Failed ones too: they complete their group again."""
    machine = assembler()
    feed(machine, [end(0, "a", 0), end(1, "a", 1), failed(2, "b", 0), end(3, "c", 0, 1.0), end(4, "c", 1)])

    state = machine.state()

    assert (state.low, state.position, state.closed, state.recent) == (2, 5, ("a",), (0.0, 0.5))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.data())
def test_stopping_anywhere_and_going_on_gives_the_same_decisions(seed, data):
    """Checkpoint after the last step, script of what was recorded since, log from `low`."""
    log = random_log(seed)
    whole = feed(assembler(siblings_needed=2), log)

    machine = assembler(siblings_needed=2)
    events, state, at_state = [], START, 0
    for record in log[: data.draw(st.integers(0, len(log)), label="stop after")]:
        for event in machine.feed(record):
            events.append(event)
            # The step may have died after its decision and before its checkpoint.
            if isinstance(event, Step) and data.draw(st.booleans(), label="checkpoint written"):
                state, at_state = machine.state(), event.number
    recorded = [as_decided(e) for e in events if isinstance(e, Step)]
    script = Script(
        steps={step.step: step for step in recorded if step.step > at_state},
        drops={e.group.id: e.reason for e in events if isinstance(e, Dropped)},
    )
    successor = assembler(state, script, siblings_needed=2)
    again = feed(successor, [record for record in log if record.offset >= state.low])

    known = [summary(e) for e in whole]
    assert [summary(e) for e in again] == known[len(known) - len(again) :]
    anew = [e for e in again if not e.recorded]
    assert [summary(e) for e in events + anew] == known
    assert successor.state() == _state_after(log)


def _state_after(log):
    machine = assembler(siblings_needed=2)
    feed(machine, log)
    return machine.state()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_every_accepted_completed_sample_is_in_exactly_one_place(seed):
    """Trained, dropped or buffered; none twice, none nowhere."""
    log = random_log(seed)
    machine = assembler(siblings_needed=2)
    places = []
    for event in feed(machine, log):
        found = event.terminals if isinstance(event, Step) else event.group.completed
        places += [(t.group, t.sample) for t in found]
    places += [(ref.group, ref.sample) for ref in machine.buffered()]

    first = {}
    owner = {}
    for record in log:
        if owner.setdefault(record.group, record.digest) == record.digest:
            first.setdefault((record.group, record.sample), record)
    assert sorted(places) == sorted(key for key, record in first.items() if record.completed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from(Filter))
def test_every_step_has_exactly_its_groups_and_no_group_is_in_two(seed, groups, how):
    """Whatever was dropped in between: the next groups take the place of those, and a step is never short."""
    machine = assembler(groups=groups, siblings_needed=1, filter=how)
    steps = [event for event in feed(machine, random_log(seed)) if isinstance(event, Step)]
    used = [group.id for step in steps for group in step.groups]

    assert {groups} >= {len(step.groups) for step in steps}
    assert len(used) == len(set(used)) == groups * len(steps)
    assert all(step.missing == 0 for step in steps)
    assert machine.kept < groups


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.randoms())
def test_a_step_does_not_depend_on_the_order_in_which_siblings_end(seed, shuffle):
    """Shuffling the records of one batch changes offsets, not members, rewards or advantages."""
    log = [r for r in random_log(seed, groups=4) if r.digest == r.group]
    first = {}
    for record in log:
        first.setdefault((record.group, record.sample), replace(record, sampled=((0, 3),)))
    records = list(first.values())
    mixed = list(records)
    shuffle.shuffle(mixed)

    def members(order):
        renumbered = [replace(record, offset=i) for i, record in enumerate(order)]
        machine = assembler(groups=4, siblings_needed=1, filter=Filter.OFF)
        steps = [e for e in feed(machine, renumbered) if isinstance(e, Step)]
        return [[(m.group, m.sample, m.reward) for m in s.members] for s in steps], [
            [float(a) for a in s.advantages] for s in steps
        ]

    assert members(records) == members(mixed)


# ---- the script


def test_a_recorded_drop_is_obeyed_whatever_the_rules_say_now():
    """The log has already said so."""
    script = Script(drops={"a": DropReason.NO_VARIANCE})

    (event,) = feed(assembler(script=script, filter=Filter.OFF, groups=1), [end(0, "a", 0, 1.0), end(1, "a", 1)])

    assert (event.reason, event.recorded) == (DropReason.NO_VARIANCE, True)


def test_a_recorded_step_keeps_its_size_when_the_configuration_has_another():
    """Resume with one group per step: the recorded step of two is made again, the next one has one."""
    log = [
        *(end(0, "a", 0, 1.0), end(1, "a", 1)),
        *(end(2, "b", 0, 1.0), end(3, "b", 1)),
        *(end(4, "c", 0, 1.0), end(5, "c", 1)),
    ]
    (recorded,) = feed(assembler(), log)

    events = feed(assembler(groups=1, script=Script(steps={1: as_decided(recorded)})), log)

    assert [[g.id for g in e.groups] for e in events] == [["a", "b"], ["c"]]
    assert [e.recorded is not None for e in events] == [True, False]


def test_a_log_that_lost_a_record_of_a_recorded_step_is_an_error():
    """It names the step and the group."""
    log = [
        *(end(0, "a", 0, 1.0), end(1, "a", 1)),
        *(end(2, "b", 0, 1.0), end(3, "b", 1)),
        *(end(4, "c", 0, 1.0), end(5, "c", 1)),
    ]
    (recorded,) = feed(assembler(), log)
    machine = assembler(script=Script(steps={1: as_decided(recorded)}))

    with pytest.raises(ScriptBroken, match=r"step 1 .*\['b'\]"):
        feed(machine, log[:2] + log[3:])


def test_of_a_group_that_is_decided_only_its_name_is_kept():
    """A run of a million groups costs their names, not which records ended them."""
    machine = assembler(groups=4)
    names = [f"g{number:04d}" for number in range(400)]
    log = [
        end(2 * number + sample, name, sample, float(sample))
        for number, name in enumerate(names)
        for sample in range(2)
    ]
    feed(machine, log)

    assert machine.state().closed == tuple(names)
    assert (machine.kept, machine.open_groups, machine.buffered()) == (0, 0, ())
    assert all(machine._arbiter.ended(name) == 0 for name in names)
    assert machine.state().low == machine.position


def test_tokens_of_another_runs_weights_are_too_old_unless_the_run_takes_them():
    """Then they count as old as may be: within the limit, and never as fresh."""
    log = [
        end(0, "a", 0, 1.0, sampled=((OTHER_RUN, 3),)),
        end(1, "a", 1, sampled=((OTHER_RUN, 3),)),
        end(2, "b", 0, 1.0, sampled=((OTHER_RUN, 3),)),
    ]
    log.append(end(3, "b", 1, sampled=((OTHER_RUN, 3),)))

    refused = feed(assembler(max_lag=2), log)
    taken = assembler(max_lag=2, replayed=True)
    (step,) = feed(taken, log)

    assert [event.reason for event in refused] == [DropReason.STALE] * 2
    assert [group.id for group in step.groups] == ["a", "b"]
    assert (taken.lag_at_use(OTHER_RUN), taken.lag_at_use(0)) == (2, 0)
