"""Drawing tokens and reporting their log-probs."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from infra.inference.local_server.sampler import Draws, draw, uniforms  # noqa: E402
from schemas.transcript import Sampling  # noqa: E402

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def draws(sampling, count=4000):
    """Draw many times from LOGITS; return ids and log-probs."""
    many = Draws(sampling=[sampling] * count, seeds=list(range(count)), indices=[0] * count)
    return draw(LOGITS.expand(count, -1), many)


def expected(sampling):
    """The distribution by definition, one token at a time."""
    probs = (LOGITS.double() / sampling.temperature).softmax(-1).numpy()
    probs[probs < sampling.min_p * probs.max()] = 0
    order = np.argsort(-probs)
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0
    mass = 0.0
    for token in order:
        if mass >= sampling.top_p * probs.sum():
            probs[token] = 0
        mass += probs[token]
    return probs / probs.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0),
        Sampling(top_k=2),
        Sampling(top_p=0.8),
        Sampling(min_p=0.2),
        Sampling(temperature=1.5, top_k=4, top_p=0.9),
    ],
)
def test_ids_follow_the_distribution_whose_logprobs_are_reported(sampling):
    """Frequencies and reported log-probs both match the processed distribution; masked ids never appear."""
    ids, logprobs = draws(sampling)
    probs = expected(sampling)
    np.testing.assert_allclose(np.bincount(ids, minlength=5) / len(ids), probs, atol=0.03)
    np.testing.assert_allclose(logprobs, np.log(probs[ids]), atol=1e-5)
    assert np.all(probs[ids] > 0)


def test_temperature_zero_takes_the_likeliest_and_reports_the_unprocessed_logprob():
    """Greedy rows ignore the filters, as in vLLM."""
    ids, logprobs = draws(Sampling(temperature=0.0, top_k=1), count=10)
    assert set(ids.tolist()) == {0}
    np.testing.assert_allclose(logprobs, LOGITS.log_softmax(-1)[0].item(), atol=1e-6)


def test_rows_do_not_influence_each_other():
    """A row gives the same token and log-prob beside rows of any other kind."""
    mixed = [Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.5), Sampling(temperature=0.3, min_p=0.1)]
    together = draw(LOGITS.expand(4, -1), Draws(sampling=mixed, seeds=[3, 4, 5, 6], indices=[0, 1, 2, 3]))
    for row, sampling in enumerate(mixed):
        alone = draw(LOGITS.expand(1, -1), Draws(sampling=[sampling], seeds=[3 + row], indices=[row]))
        assert alone[0][0] == together[0][row]
        np.testing.assert_allclose(alone[1][0], together[1][row], atol=1e-6)


def test_uniforms_are_uniform_over_seeds_and_indices():
    """Neighbouring seeds and neighbouring tokens are independent of each other."""
    by_seed = uniforms(list(range(10_000)), [0] * 10_000)
    by_index = uniforms([1] * 10_000, list(range(10_000)))
    for values in (by_seed, by_index):
        np.testing.assert_allclose(np.histogram(values, bins=10, range=(0, 1))[0], 1000, atol=130)
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.04
    assert uniforms([-1, 2**64 - 1], [0, 0])[0] == uniforms([2**64 - 1], [0])[0]
