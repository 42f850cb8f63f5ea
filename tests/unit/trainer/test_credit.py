import pytest

from trainer.algorithm_config import AlgorithmConfig
from trainer.credit import credit


def given(max_lag, step, resolved=0, versions=None, **changes):
    algorithm = AlgorithmConfig(groups=8, max_lag=max_lag, horizon=14, temperature=0.7)
    known = {n: n for n in range(step + 1)} if versions is None else versions
    return credit("r", 5, algorithm, resolved=resolved, step=step, versions=known, **changes)


@pytest.mark.parametrize(("max_lag", "expected"), [(0, 8), (1, 16), (3, 32)])
def test_a_run_may_be_ahead_by_its_lag_and_one_batch(max_lag, expected):
    """admit_up_to = resolved + (S + 1) * B."""
    assert given(max_lag, step=0).admit_up_to == expected
    assert given(max_lag, step=4, resolved=40).admit_up_to == 40 + expected


@pytest.mark.parametrize(("max_lag", "step", "expected"), [(0, 4, 4), (1, 4, 3), (1, 0, 0), (3, 2, 0)])
def test_the_oldest_version_that_may_sample_follows_the_lag(max_lag, step, expected):
    """A synchronous run waits for the version that was announced last."""
    assert given(max_lag, step).min_version == expected


def test_a_version_that_was_made_again_is_asked_for_by_its_new_number():
    """Step 1 made versions 1 and 2."""
    assert given(0, step=1, versions={0: 0, 1: 1, 2: 1}).min_version == 2


def test_horizon_and_temperature_are_stamped():
    """Siblings share them, and the epoch tells writers apart."""
    found = given(1, 0, closed=True)

    assert (found.horizon, found.temperature, found.epoch, found.closed) == (14, 0.7, 5, True)
