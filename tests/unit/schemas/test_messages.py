"""Messages as values: what they are called, what they name, what they add up to."""

from __future__ import annotations

import math

import pytest

from schemas import codec
from schemas.message import Message
from schemas.messages import Budgets, SampleId, Task, Trajectory
from schemas.outcome import Expired
from tests.golden.samples import TASK
from tests.logs import make_task
from tests.strategies import MESSAGE_TYPES


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.wire_type())
def test_messages_are_frozen_and_made_by_keyword(kind):
    """What was said cannot be changed, and no reader depends on the order of fields."""
    assert kind.__struct_config__.frozen
    with pytest.raises(TypeError):
        kind("by position")


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.wire_type())
def test_no_field_hides_the_envelope(kind):
    """`v` and `type` belong to the codec."""
    assert not {"v", "type"} & set(kind.__struct_fields__)


def test_a_message_without_a_tag_has_no_wire_type():
    """The error says what to do about it."""

    class Untagged(Message, tag=False):
        pass

    with pytest.raises(TypeError, match="give its class a `tag=`"):
        Untagged.wire_type()


def test_a_task_names_its_sample():
    """Run, group and sibling number; the attempt is not part of the name."""
    assert TASK.id == SampleId(run="example", group=TASK.group, sample=3)


def test_samples_are_ordered_by_group_then_sibling():
    """Batches and reports list them alike everywhere."""
    names = [("r", "b", 0), ("r", "a", 1), ("r", "a", 0)]
    ids = sorted(SampleId(run=run, group=group, sample=sample) for run, group, sample in names)
    assert [(name.group, name.sample) for name in ids] == [("a", 0), ("a", 1), ("b", 0)]


def test_the_budgets_add_up():
    """The reaper waits for all three stages."""
    assert Budgets(init_s=1.0, run_s=2.0, eval_s=3.5).total_s == 6.5


@pytest.mark.parametrize(
    ("field", "value"),
    [("sample", -1), ("start_by_ms", 2**62), ("start_by_ms", -1), ("horizon", 0), ("horizon", 2**40), ("attempt", -1)],
)
def test_a_task_out_of_range_is_no_task(field, value):
    """A foreign producer may write anything; what no reader could account for is refused by every reader."""
    with pytest.raises(codec.DecodeError, match=field):
        codec.decode(codec.encode(make_task(**{field: value})), Task)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": ""}, "'' is no name for a run"),
        ({"run": "a/b"}, "'a/b' is no name for a run"),
        ({"run": "r" * 5_000}, r"\(5000 characters\) is no name for a run"),
        ({"weights_of": ""}, "'' is no name for a run"),
        ({"group": "g" * 201}, "group has 201 characters; it has at most 200"),
    ],
)
def test_names_that_no_key_and_no_table_could_hold_are_refused(changes, says):
    """They are parts of keys, of paths, and of what commands print."""
    with pytest.raises(codec.DecodeError, match=says):
        codec.decode(codec.encode(make_task(**changes)), Task)


@pytest.mark.parametrize("sample", [4, 5, 2**31 - 1])
def test_a_sibling_that_its_group_does_not_have_is_no_task(sample):
    """It would complete a group in the place of one that is still to come."""
    with pytest.raises(codec.DecodeError, match="with samples = 4 it is 0 to 3"):
        codec.decode(codec.encode(make_task(sample=sample, samples=4)), Task)


@pytest.mark.parametrize("seconds", [math.nan, -1.0, math.inf])
def test_a_budget_that_is_no_time_is_refused(seconds):
    """Also where the task lies inside another message."""
    trajectory = Trajectory(
        task=make_task(budgets=Budgets(run_s=seconds)), outcome=Expired(cause="late"), stage="reaper"
    )
    with pytest.raises(codec.DecodeError, match="run_s"):
        codec.decode(codec.encode(trajectory), Trajectory)
