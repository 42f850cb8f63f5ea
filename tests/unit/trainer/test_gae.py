import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.gae import Episode, GaeRules, episode_rewards, gae, token_credit

VERL = json.loads(Path(__file__).with_name("verl_reference.json").read_text())
"""What verl computes for the same values; `verl_reference.py` made it."""


def rules(**changes):
    values = {"credit": "turn", "gamma": 1.0, "lam": 1.0, "bootstrap": True}
    return GaeRules(**{**values, **changes})


def credit(rewards, turns, values, *, truncated=False, final=0.0, **changes):
    """Return the credit of an episode: (advantages, returns, valued) as lists."""
    found = token_credit(
        Episode(sequences=(0,), rewards=tuple(rewards), truncated=truncated),
        np.array(turns),
        np.array(values, dtype=np.float32),
        final,
        rules(**changes),
    )
    return found.advantages.tolist(), found.returns.tolist(), found.valued.tolist()


# ---- by hand


def test_turns_are_discounted_and_share_their_advantage_among_their_tokens():
    """Values 1 and 2, rewards 0 and 4, gamma = lambda = 1/2.

    Last turn: 4 - 2 = 2. First: (0 + 2/2 - 1) + 1/4 * 2 = 1/2. Values inside a turn do not matter.
    """
    advantages, returns, valued = credit([0.0, 4.0], [0, 0, 1, 1, 1], [1, 9, 2, 9, 9], gamma=0.5, lam=0.5)

    assert [0.5, 0.5, 2.0, 2.0, 2.0] == advantages
    assert [1.5, 0.0, 4.0, 0.0, 0.0] == returns
    assert [1.0, 0.0, 1.0, 0.0, 0.0] == valued


def test_tokens_are_discounted_only_where_their_turn_ends():
    """Turns of two and one token, values 1, 2, 4, rewards 0 and 8, gamma = lambda = 1/2.

    Last token: 8 - 4 = 4. Before it, at its turn's end: (4/2 - 2) + 1/4 * 4 = 1. First, inside: (2 - 1) + 1 = 2.
    """
    advantages, returns, valued = credit([0.0, 8.0], [0, 0, 1], [1, 2, 4], credit="token", gamma=0.5, lam=0.5)

    assert [2.0, 1.0, 4.0] == advantages
    assert [3.0, 3.0, 8.0] == returns
    assert [1.0, 1.0, 1.0] == valued


@pytest.mark.parametrize("unit", ["turn", "token"])
def test_a_truncated_episode_goes_on_with_the_value_of_its_end(unit):
    """Reward 1, value 2 before the only token, 4 at the end, gamma 1/2: 1 + 2 - 2 = 1."""
    cut = {"truncated": True, "final": 4.0, "gamma": 0.5, "credit": unit}

    assert ([1.0], [3.0], [1.0]) == credit([1.0], [0], [2.0], **cut)


@pytest.mark.parametrize("unit", ["turn", "token"])
@pytest.mark.parametrize("ending", [{"truncated": False}, {"truncated": True, "bootstrap": False}])
def test_an_episode_that_ended_is_worth_nothing_more(unit, ending):
    """Neither is a truncated one where the option is off: 1 - 2 = -1."""
    assert ([-1.0], [1.0], [1.0]) == credit([1.0], [0], [2.0], final=4.0, gamma=0.5, credit=unit, **ending)


def test_what_a_turn_without_a_token_earned_goes_to_the_turn_before_it():
    """Turns 0, 1 and 3 said nothing: 1 is earned by turn 2, the first that spoke, and so is 4."""
    advantages, _, _ = credit([1.0, 0.0, 2.0, 4.0, 8.0], [2, 4], [0.0, 0.0], lam=0.0)

    assert [7.0, 8.0] == advantages


def test_the_episodes_reward_is_earned_by_its_last_turn():
    """Beside the process rewards, or alone."""
    assert (0.5, 0.25, 1.0) == episode_rewards((0.5, 0.25, 0.0), 1.0, 3)
    assert (0.0, -1.0) == episode_rewards((), -1.0, 2)
    assert () == episode_rewards((), 1.0, 0)


# ---- beside verl


@pytest.mark.parametrize("unit", ["turn", "token"])
@pytest.mark.parametrize("case", VERL["gae_one_token"])
def test_with_one_token_per_turn_returns_are_those_of_verl(case, unit):
    """It discounts tokens and jumps observations; here every token is a turn."""
    at = np.flatnonzero(case["mask"])
    rewards, values = (np.array(case[name])[at] for name in ("rewards", "values"))

    _, returns, _ = credit(rewards, range(len(at)), values, credit=unit, gamma=case["gamma"], lam=case["lambda"])

    np.testing.assert_allclose(returns, np.array(case["returns"])[at], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", VERL["gae_many_tokens"])
def test_without_a_discount_the_returns_of_tokens_are_those_of_verl(case):
    """Turns are the runs of sampled tokens between observations; each is rewarded at its end."""
    mask = np.array(case["mask"])
    at = np.flatnonzero(mask)
    turns = np.cumsum(np.diff(mask, prepend=0.0) == 1)[at] - 1
    rewards = np.bincount(turns, np.array(case["rewards"])[at])

    _, returns, _ = credit(rewards, turns, np.array(case["values"])[at], credit="token")

    np.testing.assert_allclose(returns, np.array(case["returns"])[at], rtol=1e-5, atol=1e-6)


# ---- properties

numbers = st.floats(-10, 10, width=32)
shares = st.floats(0, 1)


@st.composite
def episodes(draw):
    """Return (rewards, turn of each token, values): each turn has at least one token."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    turns = np.repeat(np.arange(len(sizes)), sizes)
    rewards = draw(st.lists(numbers, min_size=len(sizes), max_size=len(sizes)))
    return rewards, turns, draw(st.lists(numbers, min_size=len(turns), max_size=len(turns)))


@given(episodes(), numbers)
def test_with_lambda_1_an_advantage_is_the_return_less_the_value(episode, final):
    """Undiscounted: what was earned from the turn on, and what the end was worth."""
    rewards, turns, values = episode
    to_go = np.cumsum(rewards[::-1])[::-1] + final
    starts = np.searchsorted(turns, turns)

    of_turns, returns, valued = credit(rewards, turns, values, truncated=True, final=final)
    of_tokens, _, _ = credit(rewards, turns, values, truncated=True, final=final, credit="token")

    np.testing.assert_allclose(of_turns, to_go[turns] - np.array(values)[starts], atol=1e-4)
    np.testing.assert_allclose(of_tokens, to_go[turns] - np.array(values), atol=1e-4)
    np.testing.assert_allclose(returns, np.where(valued, to_go[turns], 0.0), atol=1e-4)


@given(episodes(), shares)
def test_with_lambda_0_an_advantage_looks_one_turn_ahead(episode, gamma):
    """It is the reward and the next value less the own one, and nothing behind that."""
    rewards, turns, values = episode
    starts = np.flatnonzero(np.diff(turns, prepend=-1))
    worth = np.append(np.array(values)[starts], 0.0)

    advantages, _, _ = credit(rewards, turns, values, gamma=gamma, lam=0.0)

    np.testing.assert_allclose(np.array(advantages)[starts], rewards + gamma * worth[1:] - worth[:-1], atol=1e-4)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8), shares, shares, st.booleans(), numbers)
def test_credit_of_tokens_is_credit_of_turns_where_each_turn_has_one_token(steps, gamma, lam, truncated, final):
    """To the bit."""
    rewards, values = zip(*steps, strict=True)
    how = {"gamma": gamma, "lam": lam, "truncated": truncated, "final": final}

    of_turns, of_tokens = (credit(rewards, range(len(steps)), values, credit=unit, **how) for unit in ("turn", "token"))

    assert of_turns == of_tokens


@given(st.lists(numbers, min_size=1, max_size=8), shares, shares)
def test_perfect_values_leave_nothing_to_learn(rewards, gamma, lam):
    """Where each value is the discounted return, every advantage is zero."""
    worth = np.zeros(len(rewards) + 1)
    for t in reversed(range(len(rewards))):
        worth[t] = rewards[t] + gamma * worth[t + 1]

    found = gae(rewards, worth[:-1], 0.0, np.full(len(rewards), gamma), np.full(len(rewards), lam))

    np.testing.assert_allclose(found, 0.0, atol=1e-9)


@given(episodes(), shares, shares)
def test_the_recursion_is_the_sum_of_discounted_temporal_differences(episode, gamma, lam):
    """As equation 16 of the paper has it: A_t = sum over l of (gamma * lambda)^l * delta_(t+l)."""
    rewards, turns, values = episode
    starts = np.flatnonzero(np.diff(turns, prepend=-1))
    worth = np.append(np.array(values)[starts], 0.0)
    deltas = np.array(rewards) + gamma * worth[1:] - worth[:-1]
    expected = [
        sum((gamma * lam) ** ahead * delta for ahead, delta in enumerate(deltas[t:])) for t in range(len(deltas))
    ]

    advantages, _, _ = credit(rewards, turns, values, gamma=gamma, lam=lam)

    np.testing.assert_allclose(np.array(advantages)[starts], expected, atol=1e-3)
