"""What a trainer says of a step, in figures and as a line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic_log import START, end, failed, rules

from infra.clock import VirtualClock
from schemas.decisions import DropReason
from trainer.config import StopConfig
from trainer.group import Group
from trainer.groups import Dropped, GroupAssembler, Step
from trainer.idle import Cause, IdleTime, cause_of_silence
from trainer.progress import Meter, Progress
from trainer.step_line import StepLines, duration, lines
from trainer.step_metrics import StepMetrics


def group(name, *successes):
    """Return a complete group whose siblings succeeded so far; its rewards have two components."""
    ended = tuple(
        end(at, name, at, success, components=(("done", success), ("form", 0.5)))
        for at, success in enumerate(successes)
    )
    return Group(id=name, admission=None, first=0, completed=ended, excluded=0)


def step(number, *groups, recorded=None):
    return Step(number=number, groups=groups, advantages=(), position=0, buffered=(), missing=0, recorded=recorded)


def dropped(*successes):
    return Dropped(group=group("d", *successes), reason=DropReason.NO_VARIANCE, position=0, recorded=False)


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def meter(clock):
    return Meter(clock, Progress(run="r", max_steps=10), StopConfig(max_steps=10))


async def pass_time(clock, seconds):
    await clock.advance(seconds)


async def test_a_step_has_its_reward_by_component_and_its_share_of_mixed_groups(meter, clock):
    """Groups that were dropped count too; one with a single graded sibling has nothing to differ from."""
    await pass_time(clock, 4)
    for event in (dropped(1.0, 1.0), dropped(0.0, 0.0), dropped(1.0)):
        meter.drop(event)
    points = meter.step(step(1, group("a", 1.0, 0.0), group("b", 1.0, 0.0)), StepMetrics(tokens=80), 1.0)

    assert meter.now.components == {"done": 0.5, "form": 0.5}
    assert meter.now.mixed_share == 0.5
    assert meter.now.tokens_per_s == 20
    values = {(point.name, *point.labels.values()): point.value for point in points}
    assert values["trainer.reward_component_mean", "form"] == 0.5
    assert values["trainer.mixed_share",] == 0.5
    assert values["trainer.groups_dropped", "filtered"] == 3
    assert {point.step for point in points} == {1}

    meter.step(step(2, group("c", 0.0, 0.0)), StepMetrics(), 1.0)
    assert meter.now.mixed_share == 0.0


async def test_idle_time_has_the_cause_that_took_most_of_it_first(meter, clock):
    """Each step's figures are of the time since the step before."""
    for cause, seconds in ((Cause.PUBLICATION, 1), (Cause.GROUPS, 2), (Cause.CREDIT, 0), (Cause.GROUPS, 1)):
        with meter.idle.waiting(cause):
            await pass_time(clock, seconds)
    await pass_time(clock, 6)
    points = meter.step(step(1, group("a", 1.0, 0.0)), StepMetrics(), 1.0)

    assert list(meter.now.idle_causes.items()) == [("groups", 0.3), ("publication", 0.1)]
    assert meter.now.idle_share == pytest.approx(0.4)
    shares = {point.labels["cause"]: point.value for point in points if point.name == "trainer.idle_cause_share"}
    assert shares == {"groups": 0.3, "publication": 0.1}

    await pass_time(clock, 1)
    meter.step(step(2, group("b", 1.0, 0.0)), StepMetrics(), 1.0)
    assert (meter.now.idle_share, meter.now.idle_causes) == (0.0, {})


async def test_time_left_follows_from_the_pace_of_new_steps_and_the_limit(clock):
    """Steps that are made again are faster than any new one; before the first new one nobody knows."""
    meter = Meter(clock, Progress(run="r", max_steps=10), StopConfig(max_steps=10, min_steps=4, time_limit_s=60))
    await pass_time(clock, 1)
    meter.step(step(1, group("a", 1.0, 0.0), recorded=object()), StepMetrics(), 1.0)
    assert (meter.now.left_s, meter.now.again) == (None, True)

    meter.begin()
    await pass_time(clock, 5)
    meter.step(step(2, group("b", 1.0, 0.0)), StepMetrics(), 1.0)
    assert (meter.now.left_s, meter.now.again) == (40, False)

    await pass_time(clock, 49)
    meter.step(step(3, group("c", 1.0, 0.0)), StepMetrics(), 1.0)
    assert meter.now.left_s == 27, "the limit is 6 s away, and the fourth step has to be made"


def test_silence_has_a_cause():
    """Sampling is slow, the credit is spent, or the step waits for others."""
    machine = GroupAssembler(rules(groups=2), START)
    assert cause_of_silence(machine, 2, None) is Cause.GROUPS
    assert cause_of_silence(machine, 2, 2) is Cause.GROUPS

    machine.feed(end(0, "a", 0))
    assert cause_of_silence(machine, 2, 2) is Cause.GROUPS
    machine.feed(failed(1, "b", 0))
    assert cause_of_silence(machine, 2, 2) is Cause.CREDIT, "both groups were admitted, their slow siblings are awaited"
    assert cause_of_silence(machine, 0, 4) is Cause.LATE


def test_time_that_an_error_ended_counts_too():
    clock = VirtualClock()
    idle = IdleTime(clock)

    with pytest.raises(OSError, match="gone"), idle.waiting(Cause.CHECKPOINT):
        raise OSError("gone")
    assert idle.shares(1.0) == {}


FIGURES = Progress(
    run="r",
    max_steps=100,
    measured=7,
    reward=0.4321,
    components={"done": 0.4, "form": 0.0321},
    success=0.41,
    recent_success=0.38,
    mixed_share=0.45,
    idle_share=0.43,
    idle_causes={"groups": 0.38, "publication": 0.05},
    tokens_per_s=812.4,
    left_s=4320,
    last=StepMetrics(kl=0.0012, entropy=1.234, clip_share=0.012, lag_mean=0.8, mismatch=0.001, tokens=80),
)


def test_a_step_is_one_line_with_every_figure_by_its_name():
    """Into a file it is never broken."""
    (line,) = lines(FIGURES)

    assert line == (
        "step   7/100  reward   0.432  success 0.41  recent 0.38  kl  0.0012  entropy  1.234  clip 0.012  lag 0.80  "
        "mixed  45%  mismatch 0.0010      812 tokens/s  idle  43% (groups)       left 1 h 12 min  "
        "reward: done 0.400, form 0.032"
    )


@pytest.mark.parametrize("width", [60, 100, 200])
def test_in_a_narrow_terminal_a_line_goes_on_in_the_next_one(width):
    """No figure is cut, and the same figure stands at the same place in each step's lines."""
    found = list(lines(FIGURES, width))
    later = list(lines(replace(FIGURES, measured=100, reward=-12.5, left_s=None, idle_causes={}, again=True), width))

    assert max(map(len, found)) <= width
    assert " ".join(" ".join(found).split()) == " ".join(next(lines(FIGURES)).split())
    assert [row.find("mixed") for row in found] == [row.find("mixed") for row in later]
    assert all(row.startswith(" " * len("step   7/100  ")) for row in found[1:])
    assert later[-1].endswith("(made again)")


def test_each_step_is_said_once():
    """Also those that a rollback has made again; not what was before the first one."""
    said = []
    say = StepLines(said.append)
    for measured in (0, 1, 1, 2, 0, 2, 3):
        say(replace(FIGURES, measured=measured, step=99))

    assert [line.split("/")[0].split()[-1] for line in said] == ["1", "2", "2", "3"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (3_500, "58 min"), (6_000, "1 h 40 min"), (200_000, "2 d 8 h")],
)
def test_a_duration_has_two_units_at_most(seconds, said):
    assert duration(seconds) == said
