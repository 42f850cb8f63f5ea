import hashlib
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantages import (
    advantage_digest,
    normalised,
    outcome_advantages,
    process_advantages,
    rloo,
    soft_overlong,
    step_advantages,
)
from trainer.algorithm_config import Estimator, Overlong

VERL = json.loads(Path(__file__).with_name("verl_reference.json").read_text())
"""What verl computes for the same rewards; `verl_reference.py` made it."""

BY_REWARD = [estimator for estimator in Estimator if not estimator.needs_model]
"""Those that need nothing but rewards."""

rewards = st.lists(st.floats(-10, 10, allow_nan=False), min_size=1, max_size=12)


def graded(*values):
    """Return samples that have nothing but a reward."""
    return [sample(value) for value in values]


def sample(reward, *turn_rewards, turns=None):
    """Return a sample with process rewards, or with none in so many turns."""
    return SimpleNamespace(
        reward=reward, turn_rewards=turn_rewards, turns=len(turn_rewards) if turns is None else turns
    )


def of_step(groups, estimator, *, std=True):
    """Return the advantages of a step of plain rewards, one number per sample."""
    return [float(a) for a in step_advantages([graded(*group) for group in groups], estimator, std=std)]


# ---- by hand


def test_grpo_divides_by_the_unbiased_standard_deviation():
    """Rewards 0, 0, 0, 1: mean 1/4, unbiased variance 1/4, so 1 becomes 3/4 over 1/2."""
    found = normalised([0.0, 0.0, 0.0, 1.0])

    np.testing.assert_allclose([-0.5, -0.5, -0.5, 1.5], found, rtol=1e-5)


def test_dr_grpo_leaves_the_standard_deviation_out():
    """Without it the advantage is the reward less the mean."""
    np.testing.assert_allclose([-0.25, -0.25, -0.25, 0.75], normalised([0.0, 0.0, 0.0, 1.0], std=False))


def test_rloo_compares_each_sibling_with_the_others():
    """The others of a 1 among three 0 average 0; those of a 0 average 1/3."""
    np.testing.assert_allclose([-1 / 3, -1 / 3, -1 / 3, 1.0], rloo([0.0, 0.0, 0.0, 1.0]), rtol=1e-6)


def test_reinforce_plus_plus_compares_each_sample_with_all_of_the_step():
    """Groups (0, 0) and (0, 1): the mean is 1/4 and the standard deviation 1/2, whose group it is does not matter."""
    found = of_step([[0.0, 0.0], [0.0, 1.0]], Estimator.REINFORCE_PLUS_PLUS)

    np.testing.assert_allclose([-0.5, -0.5, -0.5, 1.5], found, rtol=1e-5)


def test_the_group_estimators_never_look_beyond_the_group():
    """A group of high rewards beside one of low ones: each is centred by itself."""
    found = of_step([[0.0, 1.0], [10.0, 14.0]], Estimator.GRPO, std=False)

    assert found == [-0.5, 0.5, -2.0, 2.0]


def test_advantages_that_need_the_model_are_not_made_of_rewards():
    """A step then has none, and nothing to digest."""
    found = step_advantages([graded(0.0, 1.0)], Estimator.GAE, std=True)

    assert (found, advantage_digest(found)) == ((), "")
    with pytest.raises(ValueError, match="value head"):
        outcome_advantages([0.0, 1.0], Estimator.GAE, std=True)


# ---- process rewards, by hand


def test_a_turn_has_the_normalised_return_from_it_on_and_the_outcome_advantage():
    """Returns-to-go (1, 1, 0) and (2): mean 1, unbiased variance 2/3; outcomes 1 and 0 are +-1/2 without std.

    With it the outcome is +-1/sqrt(2), and the returns are (0, 0, -1, 1) / sqrt(2/3).
    """
    group = [sample(1.0, 0.0, 1.0, 0.0), sample(0.0, 2.0)]

    plain = step_advantages([group], Estimator.GRPO, std=False)
    scaled = step_advantages([group], Estimator.GRPO, std=True)

    assert [[0.5, 0.5, -0.5], [0.5]] == [a.tolist() for a in plain]
    np.testing.assert_allclose([0.70711, 0.70711, 0.70711 - 1.22474], scaled[0], atol=1e-5)
    np.testing.assert_allclose([1.22474 - 0.70711], scaled[1], atol=1e-5)


def test_a_sibling_without_process_rewards_earned_nothing_in_each_of_its_turns():
    """Returns-to-go (1) and (0, 0): mean 1/3."""
    group = [sample(0.0, 1.0), sample(0.0, turns=2)]

    first, second = step_advantages([group], Estimator.RLOO, std=False)

    np.testing.assert_allclose([2 / 3], first, rtol=1e-6)
    np.testing.assert_allclose([-1 / 3, -1 / 3], second, rtol=1e-6)


def test_groups_without_process_rewards_are_not_touched_by_those_with_them():
    """One step may hold several families."""
    plain, process = graded(0.0, 1.0), [sample(0.0, 1.0), sample(1.0, 0.0)]

    found = step_advantages([plain, process], Estimator.GRPO, std=False)

    assert [(), (), (1,), (1,)] == [a.shape for a in found]
    assert [float(a) for a in found[:2]] == of_step([[0.0, 1.0]], Estimator.GRPO, std=False)


def test_reinforce_plus_plus_normalises_process_rewards_over_the_step():
    """Returns-to-go 1 and 3 in two groups of one: +-1, and outcomes without a difference add nothing."""
    found = step_advantages([[sample(1.0, 1.0)], [sample(1.0, 3.0)]], Estimator.REINFORCE_PLUS_PLUS, std=False)

    assert [[-1.0], [1.0]] == [a.tolist() for a in found]


# ---- beside verl


@pytest.mark.parametrize(
    ("name", "estimator", "std"),
    [
        ("grpo", Estimator.GRPO, True),
        ("dr_grpo", Estimator.GRPO, False),
        ("rloo", Estimator.RLOO, True),
        ("reinforce++", Estimator.REINFORCE_PLUS_PLUS, True),
    ],
)
@pytest.mark.parametrize("case", VERL["groups"])
def test_the_estimators_are_those_of_verl(case, name, estimator, std):
    """Same rewards, same advantages; verl's own epsilon is 1e-8 under the root for REINFORCE++."""
    bounds = pairwise(np.cumsum([0, *case["sizes"]]))

    found = of_step([case["rewards"][a:b] for a, b in bounds], estimator, std=std)

    np.testing.assert_allclose(found, case["advantages"][name], rtol=1e-5, atol=1e-6)


# ---- properties


@pytest.mark.parametrize("estimator", BY_REWARD)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7])
def test_peers_without_variance_have_exactly_zero_advantage(estimator, value):
    """No rounding noise is blown up by the small denominator."""
    assert of_step([[value] * 7], estimator) == [0.0] * 7


@pytest.mark.parametrize("estimator", BY_REWARD)
def test_a_single_sample_has_no_baseline_and_no_advantage(estimator):
    """Nothing is learnt from a group of one that is the whole step."""
    assert of_step([[5.0]], estimator) == [0.0]


@given(rewards, st.randoms())
def test_advantages_do_not_depend_on_the_order_of_siblings(values, random):
    """Shuffled rewards give the same advantages, shuffled."""
    order = list(range(len(values)))
    random.shuffle(order)

    shuffled = normalised([values[i] for i in order])

    np.testing.assert_allclose(normalised(values)[order], shuffled, atol=1e-4)


@given(rewards, st.sampled_from(BY_REWARD), st.booleans())
def test_advantages_of_peers_sum_to_zero(values, estimator, std):
    """Every estimator is centred."""
    assert abs(float(outcome_advantages(values, estimator, std=std).sum())) < 1e-6


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_rloo_is_the_centred_reward_scaled_by_n_over_n_minus_1(values):
    """Leaving oneself out of the mean stretches the distance to it, and does nothing else."""
    scale = len(values) / (len(values) - 1)

    np.testing.assert_allclose(rloo(values), normalised(values, std=False) * scale, atol=1e-9)


@given(st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=4), min_size=1, max_size=4))
def test_reinforce_plus_plus_does_not_know_groups(groups):
    """The same rewards in other groups have the same advantages."""
    flat = [float(value) for group in groups for value in group]

    apart = of_step([[float(v) for v in group] for group in groups], Estimator.REINFORCE_PLUS_PLUS)

    assert apart == of_step([flat], Estimator.REINFORCE_PLUS_PLUS)


@given(rewards, st.booleans())
def test_reinforce_plus_plus_over_one_group_is_grpo(values, std):
    """The step is the group."""
    one = [values]

    assert of_step(one, Estimator.REINFORCE_PLUS_PLUS, std=std) == of_step(one, Estimator.GRPO, std=std)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=5), st.booleans())
def test_process_advantages_sum_to_zero_over_all_turns(turns, std):
    """They are centred over the turns of all siblings, not over each one's own."""
    total = sum(float(a.sum()) for a in process_advantages(turns, std=std))

    assert abs(total) < 1e-5


@given(rewards, st.floats(-5, 5), st.sampled_from(BY_REWARD))
def test_process_rewards_without_a_difference_leave_the_outcome_advantage(values, reward, estimator):
    """The same reward in the one turn of each sibling says nothing."""
    group = [sample(value, reward) for value in values]

    found = step_advantages([group], estimator, std=True)

    assert [float(a[0]) for a in found] == of_step([values], estimator)


# ---- what is written down


def test_the_digest_is_over_the_rounded_values_in_order():
    """Same values, same digest; another order, another digest."""
    values = np.array([0.1, -0.1], dtype=np.float32)

    assert advantage_digest(values) == advantage_digest(values.copy())
    assert advantage_digest(values) != advantage_digest(values[::-1])


def test_one_advantage_per_sample_has_the_digest_of_the_plain_float32_array():
    """Runs that were recorded long ago replay to the digests in their log."""
    found = step_advantages([graded(0.0, 1.0), graded(1.0, 0.25)], Estimator.GRPO, std=False)

    flat = np.array([-0.5, 0.5, 0.375, -0.375], dtype="<f4")
    assert hashlib.sha256(flat.tobytes()).hexdigest() == advantage_digest(found)


def test_the_digest_covers_the_advantage_of_each_turn():
    """Another process reward is another digest."""
    one, other = (
        step_advantages([[sample(0.0, 0.0, r), sample(0.0, 1.0)]], Estimator.GRPO, std=True) for r in (0.25, 0.5)
    )

    assert advantage_digest(one) != advantage_digest(other)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (500, -1.0)])
def test_the_overlong_punishment_falls_linearly_to_minus_one(tokens, expected):
    """With a limit of 100 and a cache of 20 it begins at 80 tokens."""
    assert soft_overlong(tokens, Overlong(max_tokens=100, cache_tokens=20)) == pytest.approx(expected)


def test_no_overlong_rule_is_no_punishment():
    """It is off unless configured."""
    assert soft_overlong(10**6, None) == 0.0
