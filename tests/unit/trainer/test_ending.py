"""When a run has ended, and why."""

from __future__ import annotations

import pytest
from paced_run import as_decided
from synthetic_log import START, end, rules

from trainer.config import StopConfig
from trainer.ending import NothingToLearn, ending
from trainer.groups import GroupAssembler, Script


def after(log, **changes):
    machine = GroupAssembler(rules(**changes), START, versions={0: 0})
    for record in log:
        machine.feed(record)
    return machine


def how(machine, *, ran_s=0.0, stopped=False, **limits):
    return ending(StopConfig(**limits), machine, ran_s=ran_s, stopped=stopped, why_no_step=lambda: "3 dropped")


DULL = [end(2 * at + sample, name, sample) for at, name in enumerate("abc") for sample in range(2)]
STEP = [end(0, "a", 0, 1.0), end(1, "a", 1), end(2, "b", 0, 1.0), end(3, "b", 1)]


def test_a_run_goes_on_until_a_limit_is_reached():
    """Steps, success, time, a request; each is named."""
    made = after(STEP)

    assert how(made, max_steps=2) is None
    assert how(made, max_steps=1).reason == "1 steps made"
    assert how(made, stopped=True).reason == "stopped"
    assert how(made, time_limit_s=5, ran_s=5.0).reason == "time limit of 5 s"
    assert how(made, time_limit_s=5, ran_s=5.0, min_steps=2) is None
    assert how(after(STEP, recent=2), success=0.5, success_groups=2).reason == "success 0.500 over 2 groups"


@pytest.mark.parametrize("policy", ["stop", "fewer"])
def test_too_many_dropped_groups_end_a_run_that_has_none_to_go_on_with(policy):
    """The message says what became of them."""
    assert how(after(DULL), max_dropped=4, on_no_variance=policy) is None
    end_ = how(after(DULL), max_dropped=3, on_no_variance=policy)
    assert (end_.reason, end_.error) == ("3 dropped", None)


def test_a_run_that_may_go_on_with_fewer_does_so_while_it_has_a_group():
    """The step is made of it."""
    log = [*DULL, end(6, "d", 0, 1.0), end(7, "d", 1)]

    assert how(after(log, groups=3), max_dropped=3, on_no_variance="fewer") is None
    assert how(after(log, groups=3), max_dropped=3, on_no_variance="stop").reason == "3 dropped"


def test_a_run_that_shall_raise_ends_with_an_error_that_says_how_to_go_on():
    """A person looks at it, and resumes."""
    end_ = how(after(DULL), max_dropped=3, on_no_variance="raise")

    assert end_.reason == "3 dropped"
    assert isinstance(end_.error, NothingToLearn)
    assert "3 dropped. 0 steps are made, and --resume goes on with a larger `stop.max_dropped`" in str(end_.error)


def test_nothing_ends_before_recorded_steps_are_made_again():
    """A stop that comes while it catches up waits for that."""
    machine = after([])
    (step,) = [event for record in STEP for event in machine.feed(record)]

    behind = GroupAssembler(rules(), START, script=Script(steps={1: as_decided(step)}), versions={0: 0})
    assert how(behind, stopped=True) is None
