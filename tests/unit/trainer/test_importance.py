import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm_config import AlgorithmConfig, Correction
from trainer.importance import ImportanceRule, importance_weights

RATIOS = [0.5, 1.0, 4.0]
"""pi_old / pi_rollout of three tokens; their product is 2."""


def weights(ratios, kind, trained=None, **bounds):
    old = torch.tensor([math.log(ratio) for ratio in ratios], requires_grad=True)
    mask = torch.ones(len(ratios)) if trained is None else torch.tensor(trained)
    found = importance_weights(old, torch.zeros(len(ratios)), mask, ImportanceRule(kind=kind, **bounds))
    assert not found.requires_grad
    return found.tolist()


@pytest.mark.parametrize(
    ("kind", "bounds", "expected"),
    [
        (Correction.OFF, {}, [1.0, 1.0, 1.0]),
        (Correction.TOKEN, {"cap": 2.0}, [0.5, 1.0, 2.0]),
        (Correction.SEQUENCE, {"cap": 3.0}, [2.0, 2.0, 2.0]),
        (Correction.SEQUENCE, {"cap": 1.5}, [1.5, 1.5, 1.5]),
        (Correction.SEQUENCE_MASK, {"cap": 3.0}, [2.0, 2.0, 2.0]),
        (Correction.SEQUENCE_MASK, {"cap": 1.5}, [0.0, 0.0, 0.0]),
        (Correction.ICEPOP, {"low": 0.4, "high": 3.0}, [0.5, 1.0, 0.0]),
        (Correction.ICEPOP, {"low": 0.6, "high": 5.0}, [0.0, 1.0, 4.0]),
    ],
)
def test_each_weight_is_as_published(kind, bounds, expected):
    """Worked by hand for ratios of 1/2, 1 and 4."""
    assert weights(RATIOS, kind, **bounds) == pytest.approx(expected)


def test_tokens_that_are_not_trained_on_are_no_part_of_a_product():
    """Without the last token the product is 1/2."""
    assert weights(RATIOS, Correction.SEQUENCE, [1.0, 1.0, 0.0]) == pytest.approx([0.5, 0.5, 0.5])


def test_a_sequence_of_any_length_has_a_finite_weight():
    """A product of 100,000 ratios overflows; its logarithm is cut first."""
    assert weights([2.0] * 100_000, Correction.SEQUENCE, cap=2.0)[0] == pytest.approx(2.0)
    assert weights([0.5] * 100_000, Correction.SEQUENCE, cap=2.0)[0] == pytest.approx(0.0, abs=1e-8)


def test_recorded_logprobs_as_the_denominator_need_no_weight():
    """The ratio then starts from what was sampled, so nothing is left to correct; nor is there with a cap of 0."""
    assert ImportanceRule.of(AlgorithmConfig(old="rollout")).kind is Correction.OFF
    assert ImportanceRule.of(AlgorithmConfig(tis_cap=0.0)).kind is Correction.OFF
    assert ImportanceRule.of(AlgorithmConfig(correction="icepop")).kind is Correction.ICEPOP


@given(st.lists(st.floats(0.25, 4.0), min_size=1, max_size=8), st.sampled_from(list(Correction)))
def test_an_engine_that_agrees_changes_nothing(ratios, kind):
    """All ratios 1 give weights 1; and no weight is ever negative or above the largest bound."""
    assert weights([1.0] * len(ratios), kind) == pytest.approx([1.0] * len(ratios))
    assert all(0.0 <= weight <= 5.0 for weight in weights(ratios, kind))
