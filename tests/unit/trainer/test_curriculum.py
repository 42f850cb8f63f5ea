import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import ConfigError
from rollmill.manifest import manifest_of
from trainer.config import AlgorithmConfig, CurriculumConfig, make_config
from trainer.credit import credit
from trainer.curriculum import Stamp, final_stamp, stages, stamp

ALGORITHM = AlgorithmConfig(horizon=14, temperature=0.7)
GROWS = CurriculumConfig(horizons=(6, 13, 20), every=100)


@pytest.mark.parametrize(
    ("step", "horizon"), [(0, 6), (99, 6), (100, 13), (199, 13), (200, 20), (299, 20), (300, 20), (10_000, 20)]
)
def test_the_horizon_grows_at_the_borders_and_the_last_one_stays(step, horizon):
    """The 100th step is the last one of the first stage: 100 steps are made when the second begins."""
    assert stamp(ALGORITHM, GROWS, step) == Stamp(horizon=horizon, temperature=0.7)


@pytest.mark.parametrize(("step", "temperature"), [(0, 0.8), (49, 0.8), (50, 0.5), (100, 0.2), (900, 0.2)])
def test_the_temperature_falls_in_the_same_way(step, temperature):
    """The horizon stays the constant one."""
    cools = CurriculumConfig(temperatures=(0.8, 0.5, 0.2), every=50)

    assert stamp(ALGORITHM, cools, step) == Stamp(horizon=14, temperature=temperature)


@given(st.integers(0, 10**6))
def test_without_a_curriculum_the_constants_hold(step):
    """Runs that were recorded before there was one are stamped as they were."""
    assert stamp(ALGORITHM, CurriculumConfig(), step) == Stamp(horizon=14, temperature=0.7)


def test_the_last_stage_is_what_is_evaluated():
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
def test_a_runs_steps_are_counted_by_stage(steps, expected):
    """A stage that the run does not reach is not there."""
    assert [(count, found.horizon) for count, found in stages(ALGORITHM, GROWS, steps)] == expected


@given(st.integers(1, 1000), st.integers(1, 50), st.lists(st.integers(1, 99), min_size=1, max_size=6))
def test_every_step_has_the_stamp_of_its_stage(steps, every, horizons):
    """The stages, laid end to end, say the same as each step by itself."""
    curriculum = CurriculumConfig(horizons=tuple(horizons), every=every)

    laid = [found for count, found in stages(ALGORITHM, curriculum, steps) for _ in range(count)]

    assert laid == [stamp(ALGORITHM, curriculum, step) for step in range(steps)]


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


def test_the_manifest_of_a_run_names_the_last_stage():
    """Whoever samples without credit, such as an evaluation, takes it from there."""
    values = {"run": "r", "model": "m", "directory": "d", "tasks": {"family": "keydoor"}}
    grows = {"curriculum": {"horizons": [6, 13, 20], "every": 100}}

    assert manifest_of(make_config({**values, **grows})).horizon == 20
    assert manifest_of(make_config(values)).horizon == 16


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ({"horizons": [6, 13]}, "every"),
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
