import msgspec
import pytest

from infra.errors import RollmillError
from schemas.decisions import (
    Action,
    Alarm,
    Branch,
    DropReason,
    Evaluated,
    GroupDropped,
    Guard,
    Member,
    RunEnded,
    StepDecided,
    TrainerStarted,
    VersionPublished,
)
from schemas.scores import Purpose
from trainer.evaluation import Played, scores
from trainer.groups import AssemblerState
from trainer.history import History
from trainer.state import TrainerState


def started(start=0):
    return TrainerStarted(run="r", config={"seed": 1}, start=start, step=0)


def step(number, epoch, digest="d"):
    return StepDecided(run="r", epoch=epoch, step=number, position=9, members=(), digest=digest, advantage_digest="a")


def version(number, made_by, epoch=0):
    return VersionPublished(run="r", epoch=epoch, step=made_by, version=number, digest=f"w{number}")


def test_decisions_of_a_trainer_that_was_replaced_do_not_count():
    """Its step 2 lies behind the TrainerStarted of its successor."""
    history = History.of([(0, started(5)), (1, step(1, 0)), (2, started(7)), (3, step(2, 0, "old")), (4, step(2, 2))])

    assert {n: s.digest for n, s in history.steps.items()} == {1: "d", 2: "d"}
    assert history.start == 5
    assert list(history.started) == [0, 2]


def test_a_record_that_lies_in_the_log_twice_counts_once():
    """A broker client writes again when an acknowledgement was lost."""
    history = History.of([(0, started()), (1, step(1, 0)), (2, step(1, 0))])

    assert list(history.steps) == [1]


def test_two_different_steps_of_one_number_are_an_error():
    """The log contradicts itself."""
    with pytest.raises(RollmillError, match="step 1 is decided twice"):
        History.of([(0, started()), (1, step(1, 0)), (2, step(1, 0, "other"))])


def test_versions_name_the_step_that_made_them():
    """A re-made version has a new number and the same step."""
    history = History.of([(0, started()), (1, version(0, 0)), (2, version(1, 1)), (3, version(2, 1))])

    assert history.made_by == {0: 0, 1: 1, 2: 1}


def test_the_script_is_what_a_checkpoint_does_not_know():
    """Later steps, and all drops: those that are closed are never asked for."""
    drop = GroupDropped(run="r", epoch=0, position=4, group="g", reason=DropReason.STALE, members=())
    history = History.of([(0, started()), (1, step(1, 0)), (2, drop), (3, step(2, 0))])

    script = history.script(after=1)

    assert list(script.steps) == [2]
    assert script.drops == {"g": DropReason.STALE}


def test_a_checkpoint_belongs_if_its_last_step_is_the_logs():
    """By number and digest."""
    history = History.of([(0, started()), (1, step(1, 0))])

    def state(steps, digest):
        return TrainerState(
            run="r", epoch=0, digest=digest, decisions=0, assembler=AssemblerState(low=0, position=0, steps=steps)
        )

    assert history.holds(state(1, "d"))
    assert history.holds(state(0, ""))
    assert not history.holds(state(1, "other"))
    assert not history.holds(state(2, "d"))


def test_an_alarm_that_ends_the_run_is_not_forgotten_for_a_milder_one_of_the_same_step():
    """A trainer that was killed before it wrote the end down must find that it was to end."""

    def alarm(guard, action):
        return Alarm(run="r", epoch=0, step=1, guard=guard, value=0, bound=1, steps=1, action=action, cause="c")

    stop, tell = alarm(Guard.ENTROPY, Action.STOP), alarm(Guard.KL, Action.TELL)
    history = History.of([(0, started()), (1, step(1, 0)), (2, stop), (3, tell)])

    assert history.stopped_by == stop


def test_an_end_is_over_when_a_trainer_starts_again():
    """A finished run can be prolonged."""
    end = RunEnded(run="r", epoch=0, position=1, step=1, reason="done")

    assert History.of([(0, started()), (1, end)]).ended == end
    assert History.of([(0, started()), (1, end), (2, started())]).ended is None


# ---- branches


def step_of(number, epoch, *groups):
    members = tuple(Member(group=g, sample=0, offset=0, content="", reward=0.0) for g in groups)
    return msgspec.structs.replace(step(number, epoch, f"d{number}-{epoch}"), members=members)


def branch(from_step, epoch=0):
    return Branch(run="r", epoch=epoch, from_step=from_step, position=9)


def drop(group, epoch=0):
    return GroupDropped(run="r", epoch=epoch, position=4, group=group, reason=DropReason.STALE, members=())


BRANCHED = [
    started(),
    version(0, 0),
    step_of(1, 0, "a"),
    version(1, 1),
    drop("w"),
    step_of(2, 0, "b"),
    drop("x"),
    step_of(3, 0, "c"),
    version(2, 3),
    branch(1),
    version(3, 1),
    drop("y"),
    step_of(2, 0, "d"),
]


def test_a_branch_leaves_the_steps_up_to_it_and_what_was_decided_after_it():
    """Steps 2 and 3 are gone, and another step 2 is there."""
    history = History.of(enumerate(BRANCHED))

    assert [[m.group for m in s.members] for s in history.steps.values()] == [["a"], ["d"]]
    assert history.last_step == 2


def test_groups_of_undone_steps_are_closed_from_the_step_that_the_run_went_on_from():
    """After a second branch further back: from that one on."""
    once = History.of(enumerate(BRANCHED))
    twice = History.of(enumerate([*BRANCHED, branch(0)]))

    assert once.closed_from == {"b": 1, "c": 1}
    assert twice.closed_from == {"a": 0, "b": 0, "c": 0, "d": 0}


def test_drops_beside_undone_steps_are_settled():
    """Their lags were counted from weights that are gone; those before and after can be found again."""
    history = History.of(enumerate(BRANCHED))

    assert (history.settled, set(history.drops)) == ({"w", "x"}, {"w", "x", "y"})


def test_numbers_of_undone_versions_stay_used_and_their_weights_are_no_step_s():
    """Weights that stay are announced anew, under a number that nobody can take for an undone one."""
    history = History.of(enumerate(BRANCHED[:10]))

    assert history.made_by == {0: 0, 1: 1}
    assert (history.next_version, history.lowest_version, history.reusable) == (3, 3, [])
    assert History.of(enumerate(BRANCHED)).made_by == {0: 0, 1: 1, 3: 1}


def test_a_checkpoint_of_an_undone_step_is_known_and_does_not_belong():
    """It is no other log's."""

    def state(steps, digest):
        return TrainerState(
            run="r", epoch=0, digest=digest, decisions=0, assembler=AssemblerState(low=0, position=0, steps=steps)
        )

    history = History.of(enumerate(BRANCHED[:10]))

    assert (history.holds(state(1, "d1-0")), history.holds(state(3, "d3-0"))) == (True, False)
    assert (history.knows(state(3, "d3-0")), history.knows(state(3, "other"))) == (True, False)


def test_the_branch_of_a_trainer_that_was_replaced_is_none():
    """It wakes up and means well."""
    history = History.of(enumerate([*BRANCHED[:9], started(), branch(0)]))

    assert (history.last_step, history.branches) == (3, [])


def evaluated(number, purpose=Purpose.EVALUATION):
    found = scores("r.eval", [Played(task="t", success=1.0)])
    return Evaluated(run="r", epoch=0, step=number, version=number, purpose=purpose, scores=found)


def test_evaluations_of_undone_steps_are_gone_and_the_gate_stays():
    """What the run goes on with is compared with what it has."""
    log = [started(), evaluated(0, Purpose.GATE), evaluated(0)]
    log += [step_of(1, 0, "a"), evaluated(1), step_of(2, 0, "b"), evaluated(2), branch(1)]

    history = History.of(enumerate(log))

    assert (sorted(history.evaluations), history.gate) == ([0, 1], evaluated(0, Purpose.GATE))
