import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm_config import Correction
from trainer.importance import ImportanceRule, importance_weights
from trainer.loss import LossRules, TokenBatch, clipped_objective, kl_estimate, policy_loss


def batch(logprobs, old, rollout, advantages, mask, reference=None, **rule):
    return TokenBatch(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        old=torch.tensor(old),
        advantages=torch.tensor(advantages),
        weight=importance_weights(torch.tensor(old), torch.tensor(rollout), torch.tensor(mask), ImportanceRule(**rule)),
        share=torch.tensor(mask),
        reference=None if reference is None else torch.tensor(reference),
    )


def test_on_policy_the_loss_is_minus_the_mean_advantage_of_trained_tokens():
    """At ratio 1 and weight 1, two trained tokens of 1.0 and 3.0 give -2.0; the masked one does not count."""
    tokens = batch([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], [1.0, 3.0, 100.0], [1.0, 1.0, 0.0])

    parts = policy_loss(tokens, LossRules(), denominator=2.0)
    parts.loss.backward()

    assert parts.loss.item() == pytest.approx(-2.0)
    assert tokens.logprobs.grad.tolist() == pytest.approx([-0.5, -1.5, 0.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.2, 1.0, 1.2),  # inside the higher clip
        (1.5, 1.0, 1.28),  # clipped above
        (0.5, 1.0, 0.5),  # a good action that became rarer is not clipped
        (0.5, -1.0, -0.8),  # clipped below
        (1.5, -1.0, -1.5),  # a bad action that became likelier is not clipped
    ],
)
def test_the_objective_is_clipped_where_it_would_overshoot(ratio, advantage, expected):
    """Clip-higher: 1 - 0.2 below, 1 + 0.28 above."""
    found = clipped_objective(torch.tensor(ratio), torch.tensor(advantage), LossRules())

    assert found.item() == pytest.approx(expected)


def test_a_clipped_token_has_no_gradient_and_is_counted():
    """Ratio e > 1.28 with a positive advantage: the clip removes its gradient."""
    tokens = batch([0.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [1.0, 1.0])

    parts = policy_loss(tokens, LossRules(), denominator=2.0)
    parts.loss.backward()

    assert tokens.logprobs.grad.tolist() == pytest.approx([0.0, -0.5])
    assert parts.clipped == 1.0


def test_the_dual_clip_bounds_the_loss_of_bad_actions():
    """With c = 3 a ratio of 10 at advantage -1 counts as -3."""
    found = clipped_objective(torch.tensor(10.0), torch.tensor(-1.0), LossRules(dual_clip=3.0))

    assert found.item() == pytest.approx(-3.0)


def test_the_weight_multiplies_the_loss():
    """A token that the engine was twice as sure of counts half."""
    tokens = batch([math.log(0.25)], [math.log(0.25)], [math.log(0.5)], [1.0], [1.0])

    assert policy_loss(tokens, LossRules(), 1.0).loss.item() == pytest.approx(-0.5)


def test_a_token_of_weight_0_has_no_gradient_but_stays_in_the_denominator():
    """IcePop leaves out the first token (ratio e^3); the second alone makes half a token's loss."""
    tokens = batch([0.0, -1.0], [0.0, -1.0], [-3.0, -1.0], [1.0, 1.0], [1.0, 1.0], kind=Correction.ICEPOP)

    parts = policy_loss(tokens, LossRules(), denominator=2.0)
    parts.loss.backward()

    assert tokens.logprobs.grad.tolist() == pytest.approx([0.0, -0.5])
    assert parts.distrusted == 1.0


def test_shares_say_what_a_token_counts():
    """A sample of one token and one of three count the same: (1 + (2 + 2 + 5) / 3) / 2 = 2."""
    tokens = batch([-1.0] * 4, [-1.0] * 4, [-1.0] * 4, [1.0, 2.0, 2.0, 5.0], [1.0, 1 / 3, 1 / 3, 1 / 3])

    assert policy_loss(tokens, LossRules(), denominator=2.0).loss.item() == pytest.approx(-2.0)


def test_the_entropy_term_rewards_entropy_with_its_coefficient():
    """Nothing else is there to gain: -0.1 * (2.0 + 0.0 + masked) / 2."""
    tokens = replace(
        batch([-1.0] * 3, [-1.0] * 3, [-1.0] * 3, [0.0] * 3, [1.0, 1.0, 0.0]),
        entropy=torch.tensor([2.0, 0.0, 9.0], requires_grad=True),
    )

    parts = policy_loss(tokens, LossRules(entropy=0.1), denominator=2.0)
    parts.loss.backward()

    assert parts.loss.item() == pytest.approx(-0.1)
    assert tokens.entropy.grad.tolist() == pytest.approx([-0.05, -0.05, 0.0])


def test_the_kl_estimators_are_those_of_schulman():
    """With log pi - log ref = 1: k1 = 1, k2 = 1/2, k3 = e^-1 - 1 + 1."""
    logprobs, reference = torch.tensor(0.0), torch.tensor(-1.0)

    assert kl_estimate(logprobs, reference, "k1").item() == pytest.approx(1.0)
    assert kl_estimate(logprobs, reference, "k2").item() == pytest.approx(0.5)
    assert kl_estimate(logprobs, reference, "k3").item() == pytest.approx(math.exp(-1) - 1 + 1)


def test_the_kl_term_is_added_with_its_coefficient():
    """The policy term is 0 here, so the loss is 0.1 * k2 per token."""
    tokens = batch([0.0], [0.0], [0.0], [0.0], [1.0], reference=[-1.0])

    parts = policy_loss(tokens, LossRules(kl=0.1, kl_kind="k2"), 1.0)

    assert parts.loss.item() == pytest.approx(0.05)
    assert parts.kl == pytest.approx(0.5)


values = st.lists(
    st.tuples(
        st.floats(-3, 0, width=32), st.floats(-3, 0, width=32), st.floats(-2, 2, width=32), st.sampled_from([0.0, 1.0])
    ),
    min_size=2,
    max_size=20,
)


@given(values, st.integers(1, 19))
def test_splitting_the_tokens_does_not_change_the_loss(rows, cut):
    """The denominator is the whole mini-batch's, so parts add up."""
    cut = min(cut, len(rows) - 1)
    denominator = max(1.0, sum(row[3] for row in rows))

    def loss(part):
        now, old, advantage, mask = (list(column) for column in zip(*part, strict=True))
        return policy_loss(batch(now, old, old, advantage, mask), LossRules(), denominator).loss.item()

    assert loss(rows) == pytest.approx(loss(rows[:cut]) + loss(rows[cut:]), abs=1e-4)
