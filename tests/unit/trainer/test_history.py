import pytest

from infra.errors import RollmillError
from schemas.decisions import DropReason, GroupDropped, RunEnded, StepDecided, TrainerStarted, VersionPublished
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


def test_an_end_is_over_when_a_trainer_starts_again():
    """A finished run can be prolonged."""
    end = RunEnded(run="r", epoch=0, position=1, step=1, reason="done")

    assert History.of([(0, started()), (1, end)]).ended == end
    assert History.of([(0, started()), (1, end), (2, started())]).ended is None
