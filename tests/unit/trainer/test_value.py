import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load

from infra.errors import ConfigError
from trainer.algorithm_config import AlgorithmConfig
from trainer.batching import TokenSequence, micro_batches
from trainer.forward import SampledTokens, sampled_logprobs, sampled_tokens
from trainer.gae import Episode
from trainer.learner import Learner
from trainer.models import Shape, create_wordlevel_model
from trainer.step_batch import StepBatch
from trainer.value import Critic, clipped_error

VERL = json.loads(Path(__file__).with_name("verl_reference.json").read_text())
"""What verl computes for the same values; `verl_reference.py` made it."""

VOCABULARY = 20
WIDTH = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the directory of a model of a few thousand parameters."""
    directory = tmp_path_factory.mktemp("model") / "m"
    shape = Shape(hidden=WIDTH, layers=1, heads=2, intermediate=32, context=64)
    create_wordlevel_model(directory, seed=0, words=[f"w{i}" for i in range(VOCABULARY - 7)], shape=shape)
    return directory


def learner(model, **changes):
    values = {"groups": 2, "minibatches": 1, "epochs": 1, "lr": 1e-2, "estimator": "gae"}
    return Learner(model, AlgorithmConfig(**{**values, **changes}), seed=7, threads=1, device="cpu")


def sequence(draw, turns, **changes):
    """Return a sequence in which two sampled tokens follow each prompt of two, in these turns of an episode."""
    length = 4 * len(turns)
    positions = np.flatnonzero(np.arange(length) % 4 >= 2)
    count = len(positions)
    values = {
        "tokens": draw.integers(0, VOCABULARY, length),
        "positions": positions,
        "rollout": draw.normal(-3, 0.2, count).astype(np.float32),
        "temperature": np.ones(count, dtype=np.float32),
        "lag": np.zeros(count, dtype=np.int64),
        "trained": np.ones(count, dtype=np.float32),
        "advantage": 0.0,
        "turns": np.repeat(turns, 2),
    }
    return TokenSequence(**{**values, **changes})


def batch(seed=0, groups=2, siblings=3, step=1):
    """Return episodes of one to three turns; the first of each group has a segment per turn."""
    draw = np.random.default_rng(seed)
    made, episodes, total = [], [], 0
    for _ in range(groups):
        own = []
        for sibling in range(siblings):
            turns = int(draw.integers(1, 4))
            parts = [[t] for t in range(turns)] if sibling == 0 else [range(turns)]
            own += [sequence(draw, np.array(part)) for part in parts]
            episodes.append(
                Episode(
                    sequences=tuple(range(total, total + len(parts))),
                    rewards=tuple(float(r) for r in draw.normal(0, 1, turns)),
                    truncated=sibling == 1,
                )
            )
            total += len(parts)
        made.append(tuple(own))
    return StepBatch(step=step, groups=tuple(made), episodes=tuple(episodes))


def seen(critic, before, ends, sequences):
    """Let a critic look at states made up for one pass."""
    (micro,) = micro_batches(sequences, 10_000)
    critic.look(states_alone(before, ends), micro)
    return micro


def states_alone(before, ends):
    """Return what a model says, apart from what a critic does not ask for."""
    empty = torch.empty(0)
    return SampledTokens(logprobs=empty, entropy=empty, before=before, ends=ends)


# ---- the head


@pytest.mark.parametrize("case", VERL["value_loss"])
def test_the_clipped_error_is_that_of_verl(case):
    """Its loss is the mean over the mask."""
    values, old, returns, mask = (torch.tensor(case[name]) for name in ("values", "old", "returns", "mask"))

    found = (clipped_error(values, old, returns, case["clip"]) * mask).sum() / mask.sum()

    assert float(found) == pytest.approx(case["loss"], rel=1e-5)


def test_without_a_clip_it_is_half_the_squared_error():
    """(3 - 1)^2 / 2."""
    assert clipped_error(*(torch.tensor([v]) for v in (3.0, 0.0, 1.0)), clip=0.0).tolist() == [2.0]


def test_the_state_before_a_token_is_what_its_logits_are_made_of(model):
    """So the head sees exactly what the policy decides from; the end is the state of the last token."""
    subject, draw = learner(model), np.random.default_rng(1)
    sequences = [sequence(draw, np.arange(n)) for n in (2, 1)]
    (micro,) = micro_batches(sequences, 100)

    with torch.no_grad():
        found = sampled_tokens(subject.model, micro, states=True)
        logits = subject.model.get_output_embeddings()(found.before)
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, micro.targets[:, None]).squeeze(1)
        everything = subject.model(input_ids=micro.ids).logits
        plain, _ = sampled_logprobs(subject.model, micro)

    torch.testing.assert_close(logprobs, found.logprobs)
    assert torch.equal(plain, found.logprobs)
    ends = torch.stack([everything[row, end] for row, end in enumerate(micro.ends)])
    torch.testing.assert_close(subject.model.get_output_embeddings()(found.ends), ends)


def test_before_the_first_step_every_state_is_worth_nothing(model):
    """Then advantages are discounted rewards: with gamma 1 and lambda 1/2, turns (0, 4) have 2 and 4."""
    one = StepBatch(
        step=1,
        groups=((sequence(np.random.default_rng(0), np.arange(2)),),),
        episodes=(Episode(sequences=(0,), rewards=(0.0, 4.0), truncated=True),),
    )
    subject = learner(model, groups=1, gae_lambda=0.5)

    start = subject._at_start(one, lambda: False)

    assert start.sequences[0].advantage.tolist() == [2.0, 2.0, 4.0, 4.0]
    assert [part.tolist() for part in start.judgement.old] == [[0.0] * 4]


@pytest.mark.parametrize("credit", ["turn", "token"])
def test_segments_are_judged_as_one_episode(credit):
    """The same states in one sequence or in three: the same advantages, targets and trained values, token for token."""
    draw = np.random.default_rng(2)
    critic = Critic(WIDTH, AlgorithmConfig(estimator="gae", credit=credit, gamma=0.9), "cpu")
    torch.nn.init.normal_(critic.head.linear.weight, generator=torch.Generator().manual_seed(0))
    whole = [sequence(draw, np.arange(3))]
    parts = [sequence(draw, np.array([t])) for t in range(3)]
    states = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    rewards = (0.5, 0.0, 1.0)

    found = []
    for sequences in (whole, parts):
        seen(critic, states, states[-1:].expand(len(sequences), -1), sequences)
        episode = Episode(sequences=tuple(range(len(sequences))), rewards=rewards, truncated=True)
        found.append(critic.judge(sequences, [episode]))

    one, three = found
    for name in ("old", "returns", "share"):
        torch.testing.assert_close(torch.cat(getattr(one, name)), torch.cat(getattr(three, name)))
    np.testing.assert_array_equal(one.sequences[0].advantage, np.concatenate([s.advantage for s in three.sequences]))


def test_a_token_too_old_to_be_trained_trains_no_value():
    """Its reward still counts for those before it."""
    draw = np.random.default_rng(3)
    critic = Critic(WIDTH, AlgorithmConfig(estimator="gae", credit="token", gae_lambda=1.0), "cpu")
    old = sequence(draw, np.arange(2), trained=np.array([1, 1, 0, 0], dtype=np.float32))
    states = torch.zeros(4, WIDTH)

    micro = seen(critic, states, states[:1], [old])
    judgement = critic.judge([old], [Episode(sequences=(0,), rewards=(0.0, 1.0), truncated=False)])
    loss = critic.loss(states_alone(states, states[:1]), micro, judgement, [0])

    assert judgement.share[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert judgement.returns[0].tolist() == [1.0] * 4
    assert float(loss.detach()) == pytest.approx(0.5)


# ---- a step with it


@pytest.mark.parametrize("credit", ["turn", "token"])
def test_micro_batches_never_change_the_gradient_of_policy_and_values(model, credit):
    """One pass per sequence or one for all: the same step up to float sums."""
    settings = {"credit": credit, "value_coefficient": 1.0}
    whole, split = (learner(model, micro_tokens=tokens, **settings) for tokens in (10_000, 1))

    one, other = whole.step(batch()), split.step(batch())

    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert one.value_loss == pytest.approx(other.value_loss, rel=1e-4)


def test_the_head_learns_what_states_are_worth(model):
    """Steps on the same episodes: the values come to explain the returns, which they did not at first."""
    subject = learner(model, epochs=4, value_clip=0.0, value_lr=0.1, gae_lambda=1.0)

    found = [subject.step(batch(step=number)) for number in range(1, 16)]

    assert found[0].value_explained == pytest.approx(0.0, abs=1e-6)
    assert found[-1].value_explained > 0.5
    assert found[-1].value_loss < found[0].value_loss / 2


def test_the_value_loss_reaches_the_policys_layers_as_far_as_its_coefficient_says(model):
    """Rewards of zero: values alone could move the policy, and have nothing to say either."""
    given = batch()
    flat = replace(given, episodes=tuple(replace(e, rewards=(0.0,) * len(e.rewards)) for e in given.episodes))

    def moved(given, **settings):
        subject = learner(model, **settings)
        torch.nn.init.ones_(subject._critic.head.linear.weight)
        return subject.step(given).grad_norm

    assert learner(model).step(flat).grad_norm == 0.0
    assert moved(given, value_coefficient=1.0) != pytest.approx(moved(given, value_coefficient=0.0), rel=1e-3)


def test_the_head_has_its_own_learning_rate_along_the_same_rise(model):
    """A tenth of the policy's, at every step of the warm-up."""
    subject = learner(model, warmup=2, lr=1e-2, value_lr=1e-3)

    rates = []
    for number in (1, 2, 3):
        subject.step(batch(step=number))
        rates.append([group["lr"] for group in subject.optimizer.param_groups])

    np.testing.assert_allclose(rates, [[5e-3, 5e-4], [1e-2, 1e-3], [1e-2, 1e-3]])


def test_a_published_model_holds_no_value_head(model):
    """Its weight file has the names of any model of its kind."""
    with_head, without = learner(model), learner(model, estimator="grpo")

    assert load(with_head.weights()).keys() == load(without.weights()).keys()


def test_a_restored_learner_goes_on_to_the_same_weights_and_values(model, tmp_path):
    """The head and its momenta are in the checkpoint."""
    straight = learner(model)
    straight.step(batch(0))
    file = tmp_path / "model.safetensors"
    file.write_bytes(straight.weights())
    kept = straight.optimizer_bytes()
    resumed = learner(model)
    resumed.restore(file, kept)

    found = [subject.step(batch(1, step=2)) for subject in (straight, resumed)]

    assert found[0] == found[1]
    assert resumed.weights() == straight.weights()
    assert torch.equal(resumed._critic.head.linear.weight, straight._critic.head.linear.weight)


@pytest.mark.parametrize(("before", "after"), [("gae", "grpo"), ("grpo", "gae")])
def test_a_checkpoint_of_the_other_kind_is_refused(model, tmp_path, before, after):
    """A head cannot be made up half-way; the error says what to do."""
    file = tmp_path / "model.safetensors"
    first = learner(model, estimator=before)
    file.write_bytes(first.weights())

    with pytest.raises(ConfigError, match=f"the estimator is '{after}': a run cannot change to or from 'gae'"):
        learner(model, estimator=after).restore(file, first.optimizer_bytes())
