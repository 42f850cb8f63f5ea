import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantages import advantage_digest, advantages, grpo, rloo, soft_overlong
from trainer.config import Estimator, Overlong

rewards = st.lists(st.floats(-10, 10, allow_nan=False), min_size=1, max_size=12)


def test_grpo_divides_by_the_unbiased_standard_deviation():
    """Rewards 0, 0, 0, 1: mean 1/4, unbiased variance 1/4, so 1 becomes 3/4 over 1/2."""
    found = grpo([0.0, 0.0, 0.0, 1.0])

    np.testing.assert_allclose([-0.5, -0.5, -0.5, 1.5], found, rtol=1e-5)


def test_dr_grpo_leaves_the_standard_deviation_out():
    """Without it the advantage is the reward less the mean."""
    np.testing.assert_allclose([-0.25, -0.25, -0.25, 0.75], grpo([0.0, 0.0, 0.0, 1.0], std=False))


def test_rloo_compares_each_sibling_with_the_others():
    """The others of a 1 among three 0 average 0; those of a 0 average 1/3."""
    np.testing.assert_allclose([-1 / 3, -1 / 3, -1 / 3, 1.0], rloo([0.0, 0.0, 0.0, 1.0]), rtol=1e-6)


@pytest.mark.parametrize("estimator", list(Estimator))
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7])
def test_a_group_without_variance_has_exactly_zero_advantage(estimator, value):
    """No rounding noise is blown up by the small denominator."""
    assert advantages([value] * 7, estimator, std=True).tolist() == [0.0] * 7


@pytest.mark.parametrize("estimator", list(Estimator))
def test_a_single_sibling_has_no_baseline_and_no_advantage(estimator):
    """Nothing is learnt from a group of one."""
    assert advantages([5.0], estimator, std=True).tolist() == [0.0]


@given(rewards, st.randoms())
def test_advantages_do_not_depend_on_the_order_of_siblings(values, random):
    """Shuffled rewards give the same advantages, shuffled."""
    order = list(range(len(values)))
    random.shuffle(order)

    shuffled = grpo([values[i] for i in order])

    np.testing.assert_allclose(grpo(values)[order], shuffled, atol=1e-4)


@given(rewards)
def test_advantages_of_a_group_sum_to_zero(values):
    """Every estimator is centred."""
    for found in (grpo(values), grpo(values, std=False), rloo(values)):
        assert abs(float(found.sum())) < 1e-3


def test_the_digest_is_over_the_rounded_values_in_order():
    """Same values, same digest; another order, another digest."""
    values = np.array([0.1, -0.1], dtype=np.float32)

    assert advantage_digest(values) == advantage_digest(values.copy())
    assert advantage_digest(values) != advantage_digest(values[::-1])


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (500, -1.0)])
def test_the_overlong_punishment_falls_linearly_to_minus_one(tokens, expected):
    """With a limit of 100 and a cache of 20 it begins at 80 tokens."""
    assert soft_overlong(tokens, Overlong(max_tokens=100, cache_tokens=20)) == pytest.approx(expected)


def test_no_overlong_rule_is_no_punishment():
    """It is off unless configured."""
    assert soft_overlong(10**6, None) == 0.0
