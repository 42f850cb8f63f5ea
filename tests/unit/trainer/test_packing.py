from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_batch import VOCABULARY, batch, create_model, half_sampled

from infra.errors import ConfigError
from trainer.algorithm_config import AlgorithmConfig
from trainer.batching import micro_batches
from trainer.forward import require_apart, sampled_tokens
from trainer.learner import Learner
from trainer.loss import LossRules, TokenBatch, policy_loss
from trainer.weights import load_model

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return the directory of a small model."""
    return create_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request, directory):
    """Return the model with each of the attentions that transformers has without further packages."""
    torch.set_num_threads(1)
    loaded = load_model(directory)
    loaded.set_attn_implementation(request.param)
    return loaded


def loss_and_gradient(model, passes, denominator):
    """Return the policy's loss over some passes, and its gradient in one vector."""
    model.zero_grad(set_to_none=True)
    loss = 0.0
    for micro in passes:
        found = sampled_tokens(model, micro)
        tokens = TokenBatch(
            logprobs=found.logprobs,
            old=micro.rollout,
            advantages=micro.advantages,
            weight=torch.ones_like(micro.rollout),
            share=micro.trained,
        )
        part = policy_loss(tokens, LossRules(), denominator).loss
        part.backward()
        loss += float(part.detach())
    return loss, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@given(LENGTHS, st.integers(1, 120))
def test_packs_hold_each_sequence_once_and_are_bounded(lengths, limit):
    """A pass has at most the tokens asked for, unless one sequence alone is longer, and no padding."""
    draw = np.random.default_rng(0)
    made = [half_sampled(draw, length) for length in lengths]

    passes = micro_batches(made, limit, packed=True)

    assert sorted(i for micro in passes for i in micro.members) == list(range(len(made)))
    for micro in passes:
        assert micro.ids.shape == (1, sum(lengths[i] for i in micro.members))
        assert micro.ids.numel() <= limit or len(micro.members) == 1
    assert sum(micro.ids.numel() for micro in passes) == sum(lengths)


def test_positions_begin_anew_at_each_sequence_and_targets_are_predicted_from_the_token_before():
    """Two sequences in one row, the longer one first."""
    draw = np.random.default_rng(0)
    first, second = (
        replace(half_sampled(draw, n), tokens=np.arange(n) + at, positions=np.arange(1, n))
        for n, at in ((3, 1), (4, 11))
    )

    (micro,) = micro_batches([first, second], 100, packed=True)

    assert (micro.members, micro.ids.tolist()) == ((1, 0), [[11, 12, 13, 14, 1, 2, 3]])
    assert micro.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert (micro.rows.tolist(), micro.columns.tolist()) == ([0, 0, 0, 1, 1], [0, 1, 2, 4, 5])
    assert (micro.targets.tolist(), micro.ends.tolist()) == ([12, 13, 14, 2, 3], [3, 6])


@settings(max_examples=25)
@given(LENGTHS, st.integers(1, 200), st.integers(0, 2**16))
def test_packing_never_changes_loss_or_gradient(model, lengths, limit, seed):
    """Whatever the lengths and however they fall into passes: as one padded batch, to 1e-5."""
    draw = np.random.default_rng(seed)
    made = [half_sampled(draw, length) for length in lengths]
    denominator = max(1.0, sum(s.trained_count for s in made))

    whole = loss_and_gradient(model, micro_batches(made, 10_000), denominator)
    packed = loss_and_gradient(model, micro_batches(made, limit, packed=True), denominator)

    assert packed[0] == pytest.approx(whole[0], abs=1e-5)
    torch.testing.assert_close(packed[1], whole[1], atol=1e-5, rtol=1e-4)


def test_nothing_of_a_sequence_reaches_another_one(model):
    """Its neighbours may hold any tokens: what is said about it, and its gradient, are the same to the bit."""
    draw = np.random.default_rng(3)
    own, before, behind = (half_sampled(draw, n) for n in (9, 12, 7))
    others = [replace(s, tokens=draw.integers(0, VOCABULARY, len(s))) for s in (before, behind)]
    found = []
    for neighbours in ((before, behind), others):
        (micro,) = micro_batches([own, *neighbours], 100, packed=True)
        at = micro.members.index(0)
        embedded = model.get_input_embeddings()(micro.ids).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, position_ids=micro.positions, use_cache=False).logits[0]
        start = int(micro.ends[at]) - len(own) + 1
        logits[start : start + len(own)].logsumexp(-1).sum().backward()
        outside = torch.cat([embedded.grad[0, :start], embedded.grad[0, start + len(own) :]])
        assert not outside.abs().any()
        found.append((logits[start : start + len(own)].detach(), embedded.grad[0, start : start + len(own)]))

    assert all(map(torch.equal, *found))


def test_a_model_that_lets_packed_sequences_see_each_other_is_refused(directory):
    """One that reads positions in another way would train on a stranger's tokens, and nothing would tell."""
    whole = load_model(directory)

    class Leaky(torch.nn.Module):
        def forward(self, input_ids, position_ids=None, **more):
            return whole(input_ids=input_ids, **more)

    require_apart(whole, VOCABULARY, "cpu")
    with pytest.raises(ConfigError, match=r"see each other \(logits differ by .*use batching = \"buckets\""):
        require_apart(Leaky(), VOCABULARY, "cpu")


@pytest.mark.parametrize(
    ("changes", "apart"),
    [
        ({}, 1e-4),
        ({"estimator": "gae", "credit": "token"}, 1e-4),
        ({"lora": {"rank": 2, "alpha": 4}, "kl": 0.1}, 1e-4),
        ({"activation_checkpointing": True}, 1e-4),
        ({"level": "sample"}, 1e-4),
        # Products are rounded to 8 bits, each way in another order.
        ({"precision": "bfloat16"}, 3e-2),
    ],
    ids=lambda value: next(iter(value), "plain") if isinstance(value, dict) else "",
)
def test_a_step_is_the_same_by_buckets_and_by_packing(directory, changes, apart):
    """With a value head, adapters beside a reference, recomputed activations, equal samples, and in bfloat16."""
    settings = {"groups": 4, "minibatches": 2, "epochs": 2, "lr": 1e-3, "micro_tokens": 30, **changes}
    steps = [
        Learner(directory, AlgorithmConfig(batching=way, **settings), seed=7, threads=1, device="cpu").step(batch())
        for way in ("buckets", "packing")
    ]

    for name in ("loss", "grad_norm", "entropy", "kl", "mismatch", "value_loss"):
        one, other = (getattr(metrics, name) for metrics in steps)
        assert one == pytest.approx(other, rel=apart, abs=apart / 10), name
