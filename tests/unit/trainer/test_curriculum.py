import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import ConfigError
from rollmill.manifest import manifest_of
from schemas.messages import Shaping
from trainer.algorithm_config import AlgorithmConfig
from trainer.config import CurriculumConfig, RewardsConfig, make_config
from trainer.credit import credit
from trainer.curriculum import PhaseRules, PhaseState, Stamp, final_stamp, phase_after, phases, stamp

ALGORITHM = AlgorithmConfig(horizon=14, temperature=0.7)
GROWS = CurriculumConfig(horizons=(6, 13, 20), every=100)


@pytest.mark.parametrize(
    ("step", "horizon"), [(0, 6), (99, 6), (100, 13), (199, 13), (200, 20), (299, 20), (300, 20), (10_000, 20)]
)
def test_the_horizon_grows_at_the_borders_and_the_last_one_stays(step, horizon):
    """The 100th step is the last one of the first phase: 100 steps are made when the second begins."""
    assert stamp(ALGORITHM, GROWS, phase_after(GROWS, step)) == Stamp(horizon=horizon, temperature=0.7)


@pytest.mark.parametrize(("step", "temperature"), [(0, 0.8), (49, 0.8), (50, 0.5), (100, 0.2), (900, 0.2)])
def test_the_temperature_falls_in_the_same_way(step, temperature):
    """The horizon stays the constant one."""
    cools = CurriculumConfig(temperatures=(0.8, 0.5, 0.2), every=50)

    assert stamp(ALGORITHM, cools, phase_after(cools, step)) == Stamp(horizon=14, temperature=temperature)


@given(st.integers(0, 10**6))
def test_without_a_curriculum_the_constants_hold(step):
    """Runs that were recorded before there was one are stamped as they were."""
    assert stamp(ALGORITHM, CurriculumConfig(), phase_after(CurriculumConfig(), step)) == Stamp(
        horizon=14, temperature=0.7
    )


def test_the_last_phase_is_what_is_evaluated():
    """Of schedules of different length each stays at its own last value."""
    both = CurriculumConfig(horizons=(6, 13, 20), temperatures=(0.8, 0.2), every=100)

    assert final_stamp(ALGORITHM, both) == Stamp(horizon=20, temperature=0.2)
    assert final_stamp(ALGORITHM, CurriculumConfig()) == Stamp(horizon=14, temperature=0.7)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (500, [(100, 6), (100, 13), (300, 20)]),
        (150, [(100, 6), (50, 13)]),
        (100, [(100, 6)]),
    ],
)
def test_a_runs_steps_are_counted_by_phase(steps, expected):
    """A phase that the run does not reach is not there."""
    assert [(count, found.horizon) for count, found in phases(ALGORITHM, GROWS, steps)] == expected


@given(st.integers(1, 1000), st.integers(1, 50), st.lists(st.integers(1, 99), min_size=1, max_size=6))
def test_every_step_has_the_stamp_of_its_phase(steps, every, horizons):
    """The phases, laid end to end, say the same as each step by itself."""
    curriculum = CurriculumConfig(horizons=tuple(horizons), every=every)

    laid = [found for count, found in phases(ALGORITHM, curriculum, steps) for _ in range(count)]

    assert laid == [stamp(ALGORITHM, curriculum, phase_after(curriculum, step)) for step in range(steps)]


def test_the_credit_carries_the_stamp_of_the_step():
    """The feeder stamps what it admits now; groups that were admitted before keep theirs."""

    def given_after(step):
        return credit(
            "r",
            1,
            ALGORITHM,
            resolved=0,
            step=step,
            versions={},
            curriculum=CurriculumConfig(horizons=(6, 13), temperatures=(0.8, 0.2), every=10),
        )

    assert (given_after(9).horizon, given_after(9).temperature) == (6, 0.8)
    assert (given_after(10).horizon, given_after(10).temperature) == (13, 0.2)


def test_the_manifest_of_a_run_names_the_last_phase():
    """Whoever samples without credit, such as an evaluation, takes it from there."""
    values = {"run": "r", "model": "m", "directory": "d", "tasks": {"family": "keydoor"}}
    grows = {"curriculum": {"horizons": [6, 13, 20], "every": 100}}

    assert manifest_of(make_config({**values, **grows})).horizon == 20
    assert manifest_of(make_config(values)).horizon == 16


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ({"horizons": [6, 13]}, "every"),
        ({"weights": [{"format": 1.0}, {}]}, "every"),
        ({"success": 0.5}, "horizons"),
        ({"weights": [{"format": float("nan")}], "every": 1}, "curriculum.weights.0.format"),
        ({"every": 100}, "horizons"),
        ({"horizons": [6, 0], "every": 1}, "curriculum.horizons.1"),
        ({"temperatures": [0.8, 0.0], "every": 1}, "curriculum.temperatures.1"),
        ({"horizons": [6], "every": 0}, "curriculum.every"),
        ({"horizon": [6], "every": 1}, "curriculum.horizon"),
    ],
)
def test_a_curriculum_that_cannot_work_is_named(section, names):
    """The error says which value."""
    with pytest.raises(ConfigError, match=names):
        make_config({"run": "r", "model": "m", "directory": "d", "curriculum": section})


# ---- phases that end by success

BY_SUCCESS = CurriculumConfig(horizons=(6, 13, 20), success=0.75, success_groups=4)
RULES = PhaseRules.of(BY_SUCCESS)
FIRST = PhaseState()


def after(groups, rules=RULES, state=FIRST, steps=0):
    """Return the state after a step whose groups were (phase, success)."""
    for phase, success in groups:
        state = state.met(phase, success, rules)
    return state.decided(steps + 1, rules)


@pytest.mark.parametrize(
    ("successes", "phase"),
    [([1.0, 1.0, 0.5], 0), ([1.0, 1.0, 0.5, 0.5], 1), ([1.0, 1.0, 0.5, 0.25], 0), ([0.0, 1.0, 1.0, 0.5, 0.5], 1)],
)
def test_a_phase_ends_when_its_last_groups_succeed_often_enough(successes, phase):
    """Not before there are as many as asked for; older ones are forgotten."""
    assert after([(0, success) for success in successes]).phase == phase


def test_what_is_left_of_an_easier_phase_says_nothing_about_the_next():
    """Its groups still arrive for a while; the count begins anew."""
    second = after([(0, 1.0)] * 4)

    assert (second.phase, second.recent) == (1, ())
    assert after([(0, 1.0)] * 9, state=second, steps=1).phase == 1
    assert after([(1, 1.0)] * 4, state=second, steps=1).phase == 2


def test_the_last_phase_stays_and_a_step_ends_one_at_most():
    """However well it goes."""
    state = after([(0, 1.0)] * 40)
    assert state.phase == 1
    state = after([(2, 1.0)] * 8, state=after([(1, 1.0)] * 8, state=state, steps=1), steps=2)
    assert state.phase == 2


def test_a_phase_may_have_a_longest_time_in_steps():
    """A policy that does not get there goes on all the same."""
    rules, state = PhaseRules.of(BY_SUCCESS.model_copy(update={"every": 3})), PhaseState()
    found = []
    for steps in range(8):
        state = after([], rules, state, steps)
        found.append(state.phase)

    assert found == [0, 0, 1, 1, 1, 2, 2, 2]


def test_stages_by_steps_have_no_such_rules():
    """What was recorded before there were any is decided as it was."""
    assert PhaseRules.of(GROWS) is None
    assert PhaseRules.of(CurriculumConfig()) is None


def test_a_plan_takes_a_phase_that_ends_by_success_to_last():
    """As long as it may; without a limit in steps all are of the last one, the dearest."""
    assert [(n, found.horizon) for n, found in phases(ALGORITHM, BY_SUCCESS, 50)] == [(50, 20)]


# ---- reward weights


def test_the_weights_of_a_phase_lie_over_those_of_the_run():
    """By component; without any a reward is what the family says."""
    curriculum = CurriculumConfig(weights=({"format": 1.0}, {"format": 0.0, "opened": 2.0}), every=10)
    rewards = RewardsConfig(weights={"format": 0.5, "repeated_actions": 0.1}, long_action=9)

    def shaping(phase):
        return stamp(ALGORITHM, curriculum, phase, rewards).shaping

    assert shaping(0) == Shaping(weights={"format": 1.0, "repeated_actions": 0.1}, long_action=9)
    assert shaping(1) == Shaping(weights={"format": 0.0, "opened": 2.0, "repeated_actions": 0.1}, long_action=9)
    assert shaping(7) == shaping(1)
    assert stamp(ALGORITHM, GROWS, 0).shaping is None


def test_a_credit_says_phase_and_weights():
    """The feeder stamps both on what it admits."""
    curriculum = CurriculumConfig(weights=({"format": 1.0}, {"format": 0.0}), every=10)

    given = credit("r", 1, ALGORITHM, resolved=0, step=10, versions={}, curriculum=curriculum, decided=77)

    assert (given.phase, given.shaping, given.decided) == (1, Shaping(weights={"format": 0.0}), 77)
    by_success = credit("r", 1, ALGORITHM, resolved=0, step=99, versions={}, curriculum=BY_SUCCESS, phase=1)
    assert (by_success.phase, by_success.horizon, by_success.shaping) == (1, 13, None)
