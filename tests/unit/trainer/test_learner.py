from dataclasses import replace

import numpy as np
import pytest
import torch
from synthetic_batch import VOCABULARY, create_model

from infra.inference.canary import apart
from infra.inference.local_server.engine import Engine
from infra.inference.local_server.weights import load_model as load_slot_model
from trainer.algorithm_config import AlgorithmConfig
from trainer.batching import TokenSequence, micro_batches
from trainer.forward import sampled_logprobs
from trainer.learner import Diverged, Interrupted, Learner, StepBatch
from trainer.weights import write_model_directory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the directory of a model of a few thousand parameters."""
    return create_model(tmp_path_factory.mktemp("model") / "m")


def learner(model, **changes):
    values = {"groups": 4, "minibatches": 2, "epochs": 2, "lr": 1e-2}
    return Learner(model, AlgorithmConfig(**{**values, **changes}), seed=7, threads=1, device="cpu")


def sequence(draw, advantage, length=None):
    length = length or int(draw.integers(4, 24))
    positions = np.flatnonzero(draw.random(length - 1) < 0.6).astype(np.int64) + 1
    if not len(positions):
        positions = np.array([1])
    count = len(positions)
    return TokenSequence(
        tokens=draw.integers(0, VOCABULARY, length),
        positions=positions,
        rollout=draw.normal(-2.5, 0.3, count).astype(np.float32),
        temperature=np.full(count, 0.7, dtype=np.float32),
        lag=np.zeros(count, dtype=np.int64),
        trained=(draw.random(count) < 0.9).astype(np.float32),
        advantage=advantage,
    )


def batch(seed=0, groups=4, siblings=4):
    draw = np.random.default_rng(seed)
    return StepBatch(
        step=1,
        groups=tuple(tuple(sequence(draw, float(draw.normal())) for _ in range(siblings)) for _ in range(groups)),
    )


def weights(learner):
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()])


@pytest.mark.parametrize(
    "changes", [{}, {"batching": "packing"}, {"lora": {"rank": 2}}], ids=["padded", "packed", "adapters"]
)
def test_the_canary_is_what_an_engine_with_the_published_weights_says(model, tmp_path, changes):
    """And not what one with those of a step before says."""
    subject = learner(model, lr=0.1, **changes)
    found = []
    for name in ("before", "after"):
        write_model_directory(tmp_path / name, subject.weights(), model)
        found.append(subject.canary())
        subject.step(batch())

    for folder, distances in (("before", (0.0, None)), ("after", (None, 0.0))):
        engine = Engine(load_slot_model(tmp_path / folder, torch.float32))
        engine.start()
        for canary, distance in zip(found, distances, strict=True):
            said = apart(canary, np.array(engine.score(canary.prompt).result(20), np.float32))
            assert said < 1e-4 if distance == 0.0 else said > 0.01
        engine.stop()


def test_the_same_step_from_the_same_weights_gives_the_same_bytes(model):
    """Deterministic on the CPU with one thread."""
    first, second = learner(model), learner(model)

    first.step(batch())
    second.step(batch())

    assert first.weights() == second.weights()


@pytest.mark.parametrize("micro_tokens", [1, 40, 90])
def test_micro_batches_never_change_the_gradient(model, micro_tokens):
    """One pass per sequence or one for all: the same step up to float sums."""
    whole, split = learner(model, micro_tokens=10_000), learner(model, micro_tokens=micro_tokens)

    one, other = whole.step(batch()), split.step(batch())

    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert one.loss == pytest.approx(other.loss, abs=1e-5)


def test_the_order_of_siblings_does_not_change_the_gradient(model):
    """The loss is a sum over tokens."""
    given = batch()
    turned = replace(given, groups=tuple(tuple(reversed(group)) for group in given.groups))
    settings = {"epochs": 1, "minibatches": 1}

    one, other = learner(model, **settings).step(given), learner(model, **settings).step(turned)

    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


def test_zero_advantages_leave_the_weights_alone(model):
    """A group without variance would teach nothing."""
    given = batch()
    flat = replace(given, groups=tuple(tuple(replace(s, advantage=0.0) for s in g) for g in given.groups))
    subject = learner(model)
    before = weights(subject)

    metrics = subject.step(flat)

    assert torch.equal(before, weights(subject))
    assert metrics.grad_norm == 0.0


def test_a_step_makes_rewarded_tokens_likelier(model):
    """The sign is right."""
    draw = np.random.default_rng(1)
    good, bad = sequence(draw, 1.0, 16), sequence(draw, -1.0, 16)
    subject = learner(model, groups=1, minibatches=1, epochs=4, tis_cap=0.0)
    (micro,) = micro_batches([good, bad], 100)

    def likelihood():
        values = sampled_logprobs(subject.model, micro)[0].detach() * micro.trained
        return [float(values[micro.rows == row].sum()) for row in range(2)]

    before = likelihood()
    subject.step(StepBatch(step=1, groups=((good, bad),)))
    after = likelihood()

    assert after[0] > before[0]
    assert after[1] < before[1]


def test_the_temperature_of_the_span_divides_the_logits(model):
    """At twice the temperature the distribution is flatter: its entropy is higher."""
    draw = np.random.default_rng(2)
    cool = sequence(draw, 1.0, 12)
    warm = replace(cool, temperature=cool.temperature * 2)
    subject = learner(model)

    spread = [
        float(sampled_logprobs(subject.model, micro_batches([s], 100)[0])[1].detach().sum()) for s in (cool, warm)
    ]

    assert spread[1] > spread[0]


def test_padding_does_not_reach_real_tokens(model):
    """A short sequence has the same log-probs alone and beside a long one."""
    draw = np.random.default_rng(3)
    short, long = sequence(draw, 1.0, 5), sequence(draw, 1.0, 30)
    subject = learner(model)

    alone = sampled_logprobs(subject.model, micro_batches([short], 1000)[0])[0].detach()
    (both,) = micro_batches([short, long], 1000)
    beside = sampled_logprobs(subject.model, both)[0].detach()[both.rows == 0]

    torch.testing.assert_close(alone, beside)


def test_a_restored_learner_goes_on_to_the_same_bytes(model, tmp_path):
    """Weights, momenta and the count of optimizer steps are all there is."""
    straight = learner(model, warmup=10)
    straight.step(batch(0))
    file = tmp_path / "model.safetensors"
    file.write_bytes(straight.weights())
    kept = straight.optimizer_bytes()
    straight.step(replace(batch(1), step=2))

    resumed = learner(model, warmup=10)
    resumed.restore(file, kept)
    resumed.step(replace(batch(1), step=2))

    assert resumed.weights() == straight.weights()


def test_a_resumed_learner_has_the_decay_and_the_momenta_that_it_was_given(model, tmp_path):
    """A resumed run may change them; the checkpoint's are those of the trainer before."""
    before = learner(model)
    before.step(batch(0))
    file = tmp_path / "model.safetensors"
    file.write_bytes(before.weights())
    after = learner(model, weight_decay=0.25, betas=(0.5, 0.75))
    after.restore(file, before.optimizer_bytes())

    assert {(group["weight_decay"], group["betas"]) for group in after.optimizer.param_groups} == {(0.25, (0.5, 0.75))}
    assert all("exp_avg" in kept for kept in after.optimizer.state.values())


def test_a_gradient_that_is_not_finite_moves_nothing(model):
    """Weights of NaN would be checkpointed and published; no bound of a guard is beyond NaN."""
    subject = learner(model)
    weights = subject.weights()
    with torch.no_grad():
        parameter = next(subject.model.parameters())
    parameter.register_hook(lambda gradient: gradient * float("inf"))

    with pytest.raises(Diverged, match=r"gradient of norm (nan|inf): nothing is moved"):
        subject.step(batch(0))
    assert subject.weights() == weights


def test_the_learning_rate_rises_over_the_warm_up(model):
    """Then it is constant."""
    subject = learner(model, warmup=4, lr=1.0)

    rates = []
    for subject.optimizer_steps in (0, 1, 3, 4, 50):
        rates.append(subject.learning_rate())

    assert rates == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_tokens_beyond_the_lag_are_counted_as_masked(model):
    """The metrics tell staleness and numerics apart."""
    draw = np.random.default_rng(4)
    fresh = sequence(draw, 1.0, 10)
    stale = replace(fresh, lag=np.full_like(fresh.lag, 3), trained=np.zeros_like(fresh.trained), advantage=-1.0)
    subject = learner(model, groups=1, minibatches=1)

    metrics = subject.step(StepBatch(step=1, groups=((replace(fresh, trained=np.ones_like(fresh.trained)), stale),)))

    assert metrics.masked_share == pytest.approx(0.5)
    assert metrics.lag_max == 0
    assert metrics.mismatch > 0


def test_an_engine_that_is_silently_back_on_older_weights_shows_as_mismatch_and_not_as_lag(model):
    """It says the newest version and samples by the first one: the trainer's own log-probs tell, in the first step.

    Tokens that are said to be old differ as much, and rightly: they are not counted.
    """
    asked, base = batch(1), learner(model)

    def mismatch(samples_by, lag=0):
        """Return what is seen by a trainer at its second step whose batch was sampled by another model."""
        trainer = learner(model)
        trainer.step(batch(0))
        engine = trainer if samples_by is None else samples_by
        sampled = [[recorded(engine, one, lag) for one in group] for group in asked.groups]
        return trainer.step(replace(asked, step=2, groups=tuple(map(tuple, sampled)))).mismatch

    def recorded(engine, one, lag):
        values = sampled_logprobs(engine.model, micro_batches([one], 1000)[0])[0].detach().numpy()
        return replace(one, rollout=values, lag=np.full_like(one.lag, lag))

    assert mismatch(None) < 1e-5
    assert mismatch(base) > 1e-2
    assert mismatch(base, lag=1) == 0.0


def test_a_batch_without_a_trained_token_is_a_step_that_changes_nothing(model):
    """Every token was too old."""
    given = batch()
    masked = replace(
        given, groups=tuple(tuple(replace(s, trained=np.zeros_like(s.trained)) for s in g) for g in given.groups)
    )
    subject = learner(model)
    before = weights(subject)

    metrics = subject.step(masked)

    assert torch.equal(before, weights(subject))
    assert (metrics.optimizer_steps, metrics.masked_share) == (0, 1.0)


def test_the_kl_term_keeps_a_second_model_that_is_not_trained(model):
    """At the first step both are the same: KL is 0; later it is not."""
    subject = learner(model, kl=0.1)

    first = subject.step(batch(0))
    second = subject.step(replace(batch(1), step=2))

    assert first.kl >= 0
    assert second.kl > first.kl


def test_recorded_logprobs_can_be_the_ratios_denominator(model):
    """`old = rollout` turns the importance weight off; how far engine and trainer differ is told all the same."""
    metrics = learner(model, old="rollout").step(batch())

    assert metrics.weight == 1.0
    assert metrics.mismatch == learner(model).step(batch()).mismatch > 0


def test_a_step_can_be_given_up_between_passes(model):
    """A cancelled run does not wait for a long step."""
    answers = iter([False, False, True])

    with pytest.raises(Interrupted):
        learner(model, micro_tokens=1).step(batch(), lambda: next(answers))


def test_the_learning_rate_falls_along_a_cosine_to_its_floor(model):
    """After the rise: the whole rate, half-way between, and the floor for good."""
    subject = learner(model, warmup=2, decay=4, lr=1.0, lr_floor=0.2)
    rates = []
    for subject.optimizer_steps in range(9):
        rates.append(subject.learning_rate())

    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[4] == pytest.approx(0.6)
    assert rates[6:] == pytest.approx([0.2] * 3)


def test_at_sample_level_a_long_sample_weighs_no_more_than_a_short_one(model):
    """Both levels agree when all samples are of one length, and differ otherwise."""
    draw = np.random.default_rng(4)

    def full(length, advantage):
        found = sequence(draw, advantage, length)
        count = length - 1
        return replace(
            found,
            positions=np.arange(1, length),
            rollout=np.full(count, -2.0, dtype=np.float32),
            temperature=np.ones(count, dtype=np.float32),
            lag=np.zeros(count, dtype=np.int64),
            trained=np.ones(count, dtype=np.float32),
        )

    def norms(*lengths):
        given = StepBatch(step=1, groups=(tuple(full(n, a) for n, a in zip(lengths, (1.0, -1.0), strict=True)),))
        settings = {"groups": 1, "minibatches": 1, "epochs": 1}
        return [learner(model, level=level, **settings).step(given).grad_norm for level in ("token", "sample")]

    alike, unlike = norms(12, 12), norms(6, 20)

    assert alike[0] == pytest.approx(alike[1], rel=1e-4)
    assert unlike[0] != pytest.approx(unlike[1], rel=1e-2)


def test_the_segments_of_a_sample_count_once_at_sample_level(model):
    """Two halves with half the share each are one sample, not two."""
    subject = learner(model, level="sample")
    draw = np.random.default_rng(5)
    whole = [replace(sequence(draw, 1.0, 8), trained=trained) for trained in (np.ones(1), np.ones(3))]
    halves = [replace(whole[0], share=0.25), replace(whole[1], share=0.75)]

    assert subject._denominator(halves) == pytest.approx(1.0)
    assert subject._denominator(whole) == pytest.approx(2.0)


def test_the_entropy_term_acts_below_its_floor_alone(model):
    """Its weight rises from 0 at the floor; a nearly uniform policy has about ln 20 = 3 nats."""
    above, below = learner(model, entropy_floor=0.5, entropy_weight=0.1), learner(model, entropy_floor=6.0)

    free, held = above.step(batch()), below.step(batch())

    assert free.entropy_weight == 0.0
    assert held.entropy_weight == pytest.approx(0.01 * (1 - held.entropy / 6.0))


def test_the_entropy_term_makes_the_policy_less_sure(model):
    """With nothing else to gain, entropy grows."""
    given = batch()
    flat = replace(given, groups=tuple(tuple(replace(s, advantage=0.0) for s in g) for g in given.groups))
    subject = learner(model, entropy_floor=100.0, entropy_weight=1.0, lr=1e-3)

    before, after = subject.step(flat).entropy, subject.step(flat).entropy

    assert after > before


def test_the_reference_follows_the_policy_when_it_is_reset(model):
    """Every second step: the KL term begins at 0 again, a restored learner goes on to the same bytes."""
    subject = learner(model, kl=0.1, ref_reset=2)
    start = weights(subject)
    subject.step(batch())
    assert torch.equal(torch.cat([p.flatten() for p in subject.policy.reference.parameters()]), start)

    subject.step(replace(batch(1), step=2))

    assert torch.equal(torch.cat([p.flatten() for p in subject.policy.reference.parameters()]), weights(subject))
    assert not subject.optimizer.state


def test_a_moved_reference_survives_a_restart(model, tmp_path):
    """It is part of the checkpoint, since the model directory no longer tells it."""
    straight = learner(model, kl=0.1, ref_reset=1)
    straight.step(batch())
    (tmp_path / "model.safetensors").write_bytes(straight.weights())
    resumed = learner(model, kl=0.1, ref_reset=1)
    resumed.restore(tmp_path / "model.safetensors", straight.optimizer_bytes())

    straight.step(replace(batch(1), step=2))
    resumed.step(replace(batch(1), step=2))

    assert straight.weights() == resumed.weights()


def test_activations_that_are_computed_again_give_the_same_gradient(model):
    """Memory is saved, nothing else changes."""
    plain, again = learner(model).step(batch()), learner(model, activation_checkpointing=True).step(batch())

    assert again.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    assert again.loss == pytest.approx(plain.loss, abs=1e-6)


def test_bfloat16_is_near_float32(model):
    """Seven bits of mantissa are enough for the direction; weights stay float32."""
    subject = learner(model, precision="bfloat16")

    coarse, fine = subject.step(batch()), learner(model).step(batch())

    assert coarse.grad_norm == pytest.approx(fine.grad_norm, rel=0.1)
    assert {p.dtype for p in subject.model.parameters()} == {torch.float32}
