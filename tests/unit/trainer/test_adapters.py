from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file

from infra.errors import ConfigError
from infra.inference.local_server.weights import read_weights, swap_weights
from tests.unit.trainer.synthetic_batch import VOCABULARY, batch, create_model
from trainer.adapters import merged, put_adapters, without_adapters
from trainer.algorithm_config import AlgorithmConfig, Lora
from trainer.batching import micro_batches
from trainer.config import make_config
from trainer.forward import sampled_logprobs
from trainer.learner import Learner
from trainer.model_shape import ModelShape
from trainer.plan_memory import trained_count
from trainer.weights import load_model, write_model_directory

IDS = torch.arange(1, 13).reshape(2, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the directory of a model of a few thousand parameters."""
    return create_model(tmp_path_factory.mktemp("model") / "m")


def learner(model, lora=None, **changes):
    values = {"groups": 4, "minibatches": 2, "epochs": 1, "lr": 1e-2, "lora": lora or {"rank": 4, "alpha": 8}}
    return Learner(model, AlgorithmConfig(**{**values, **changes}), seed=7, threads=1, device="cpu")


def trained(model, steps=3, **changes):
    """Return a learner that has made some steps."""
    subject = learner(model, **changes)
    for step in range(1, steps + 1):
        subject.step(batch(step))
    return subject


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def empty(layer):
    """Return the adapter of a layer before its first step."""
    return {f"{layer}.lora_A.default.weight": torch.ones(1, 1), f"{layer}.lora_B.default.weight": torch.zeros(1, 1)}


def base_weights(subject):
    return {n: t.clone() for n, t in subject.model.state_dict().items() if ".lora_" not in n}


def test_a_published_version_is_a_whole_model_that_says_the_same(model, tmp_path):
    """It has the names of any model of its kind, loads like one, and its logits are those of model and adapters."""
    subject = trained(model)

    write_model_directory(tmp_path / "v", subject.weights(), model)

    assert load_file(tmp_path / "v" / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()
    found = logits(load_model(tmp_path / "v"))
    torch.testing.assert_close(found, logits(subject.model), atol=1e-5, rtol=0)
    assert float((found - logits(load_model(model))).abs().max()) > 1e-2


def test_the_local_server_takes_a_published_version_in_place_of_the_model_it_serves(model, tmp_path):
    """An engine that knows no adapters loads it."""
    subject = trained(model)
    write_model_directory(tmp_path / "v", subject.weights(), model)
    served = load_model(model)

    swap_weights(served, read_weights(tmp_path / "v"))

    torch.testing.assert_close(logits(served), logits(subject.model), atol=1e-5, rtol=0)


def test_publishing_changes_nothing_of_what_is_trained(model):
    """The same bytes twice, the model is that of before to the bit, and the next step is that of an unpublished one."""
    published, silent = trained(model), trained(model)
    before = {name: tensor.clone() for name, tensor in published.model.state_dict().items()}

    first, second = published.weights(), published.weights()

    assert first == second
    assert all(torch.equal(tensor, before[name]) for name, tensor in published.model.state_dict().items())
    assert published.step(batch(9)) == silent.step(batch(9))
    assert published.weights() == silent.weights()


def test_merging_is_what_peft_does(model):
    """Independent reference: its own merge into the layers."""
    plain = load_model(model)
    put_adapters(plain, Lora(rank=3, alpha=5))
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, generator=torch.Generator().manual_seed(len(name)))
    ours = merged(plain.state_dict(), 5 / 3)

    layers = [module for module in plain.modules() if hasattr(module, "merge") and hasattr(module, "base_layer")]
    for layer in layers:
        layer.merge()

    assert len(layers) == 2 * 7
    theirs = {n.replace(".base_layer", ""): t for n, t in plain.state_dict().items() if ".lora_" not in n}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=1e-6)


def test_a_run_begins_with_the_very_model_of_its_directory(model):
    """B is 0 at first, so that version 0 is that of a run without adapters, down to the sign of a zero."""
    assert merged({"a.base_layer.weight": torch.tensor([[-0.0]]), **empty("a")}, 2.0)["a.weight"].signbit().all()
    assert logits(learner(model).model).equal(logits(load_model(model)))
    assert {n: t.tolist() for n, t in load(learner(model).weights()).items()} == {
        n: t.tolist() for n, t in load_file(model / "model.safetensors").items()
    }


def test_only_adapters_move_and_only_they_are_kept(model):
    """The rest of the model is that of the directory, and no part of a checkpoint."""
    subject = learner(model)
    before = base_weights(subject)

    subject.step(batch())

    assert all(torch.equal(tensor, before[name]) for name, tensor in base_weights(subject).items())
    kept = load(subject.trained_weights())
    assert all(".lora_" in name for name in kept)
    assert sum(t.numel() for t in kept.values()) == sum(p.numel() for p in subject.policy.trained())
    assert len(subject.optimizer.state) == len(kept)


def test_the_targets_say_which_layers_have_an_adapter(model):
    """By the ends of their names; all linear layers but the output unless said otherwise."""
    some = learner(model, lora={"targets": ["q_proj", "mlp.up_proj"]})

    layers = {name.split(".lora_")[0] for name in load(some.trained_weights())}

    assert {layer.partition(".layers.")[2] for layer in layers} == {
        f"{number}.{part}" for number in (0, 1) for part in ("self_attn.q_proj", "mlp.up_proj")
    }
    assert len(load(learner(model).trained_weights())) == 2 * 2 * 7


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "mlp.up_proj"]])
def test_a_plan_counts_the_adapters_that_there_are(model, targets):
    """From the model's shape alone."""
    subject = learner(model, lora={"rank": 3, "targets": targets})
    shape = ModelShape(layers=2, hidden=16, heads=2, intermediate=32, vocabulary=VOCABULARY, tied=True)

    found = trained_count(shape, AlgorithmConfig(lora={"rank": 3, "targets": targets}))

    assert found == sum(parameter.numel() for parameter in subject.policy.trained())


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("query", "no layer of the model ends with it; the model has .*'q_proj'"),
        ("proj", "no layer of the model ends with it"),
        ("embed_tokens", "no linear layer"),
        ("lm_head", "shares its weights with another layer, which would change too"),
    ],
)
def test_a_target_that_cannot_have_an_adapter_is_refused(model, target, why):
    """Before the run starts, with what there is instead."""
    with pytest.raises(ConfigError, match=f"algorithm.lora.targets: .*{target}.*{why}"):
        learner(model, lora={"targets": ["q_proj", target]})


def test_the_seed_decides_the_adapters_and_nothing_else_is_drawn(model):
    """The same run begins the same wherever random numbers stood."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = learner(model).trained_weights()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)

    assert learner(model).trained_weights() == first


@pytest.mark.parametrize("settings", [{}, {"estimator": "gae"}, {"kl": 0.1}, {"kl": 0.1, "ref_reset": 2}])
def test_a_restored_learner_goes_on_to_the_same_bytes(model, tmp_path, settings):
    """Adapters, momenta, value head and a reference that was moved are all there is."""
    straight = trained(model, **settings)
    file = tmp_path / "model.safetensors"
    file.write_bytes(straight.trained_weights())
    kept = straight.optimizer_bytes()
    resumed = learner(model, **settings)
    resumed.restore(file, kept)

    found = [subject.step(batch(4)) for subject in (straight, resumed)]

    assert found[0] == found[1]
    assert resumed.weights() == straight.weights()
    assert resumed.optimizer_bytes() == straight.optimizer_bytes()


@pytest.mark.parametrize("now", [{"rank": 8}, {"rank": 4, "alpha": 16}, {"rank": 4, "targets": ["q_proj"]}, None])
def test_a_checkpoint_of_other_adapters_is_refused(model, tmp_path, now):
    """Also where their shapes are the same; the error names both."""
    first = learner(model, lora={"rank": 4, "alpha": 8})
    file = tmp_path / "model.safetensors"
    file.write_bytes(first.trained_weights())
    other = (
        learner(model, lora=Lora(**now))
        if now
        else Learner(model, AlgorithmConfig(groups=4), seed=7, threads=1, device="cpu")
    )

    with pytest.raises(ConfigError, match=r"lora = \{'rank': 4, 'alpha': 8.* now it is .*cannot change its adapters"):
        other.restore(file, first.optimizer_bytes())


def test_the_reference_is_the_model_without_adapters(model):
    """No second model: its log-probs are those of the directory, and training goes on as if nobody had asked."""
    subject = trained(model, kl=0.1)
    (micro,) = micro_batches([s for g in batch().groups for s in g], 10_000)

    with torch.no_grad():
        found = subject.policy.reference_logprobs(micro)
        wanted = sampled_logprobs(load_model(model), micro)[0]
        own = sampled_logprobs(subject.model, micro)[0]

    assert subject.policy.reference is None
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert float((own - wanted).abs().max()) > 1e-3
    assert all(p.requires_grad == (".lora_" in n) for n, p in subject.model.named_parameters())


def test_a_reference_that_was_moved_is_the_policy_of_that_step(model):
    """Its adapters are kept; asking for it leaves those in training as they are."""
    subject = trained(model, steps=2, kl=0.1, ref_reset=2)
    then = logits(subject.model)
    subject.step(batch(3))
    now = subject.trained_weights()

    with subject.policy._as_reference():
        assert torch.equal(logits(subject.model), then)

    assert subject.trained_weights() == now
    assert not torch.equal(logits(subject.model), then)


def test_without_adapters_means_until_the_block_ends(model):
    """Also where it ends in an error."""
    subject = trained(model)
    before = logits(subject.model)

    with pytest.raises(ValueError, match="in between"), without_adapters(subject.model):
        assert torch.equal(logits(subject.model), logits(load_model(model)))
        raise ValueError("in between")

    assert torch.equal(logits(subject.model), before)


def test_adapters_go_with_activations_that_are_computed_again(model):
    """Memory is saved, nothing else changes."""
    plain, again = trained(model, steps=1), trained(model, steps=1, activation_checkpointing=True)

    torch.testing.assert_close(logits(again.model), logits(plain.model), atol=1e-6, rtol=0)


def test_adapters_make_rewarded_tokens_likelier(model):
    """The sign is right."""
    given = batch(groups=1, siblings=2)
    good, bad = (replace(s, trained=np.ones_like(s.trained)) for s in given.groups[0])
    pair = replace(given, groups=((replace(good, advantage=1.0), replace(bad, advantage=-1.0)),))
    subject = learner(model, groups=1, minibatches=1, epochs=4, tis_cap=0.0)
    (micro,) = micro_batches([good, bad], 100)

    def likelihood():
        values = sampled_logprobs(subject.model, micro)[0].detach()
        return [float(values[micro.rows == row].sum()) for row in range(2)]

    before = likelihood()
    subject.step(pair)
    after = likelihood()

    assert after[0] - before[0] > after[1] - before[1]


@pytest.mark.parametrize("lora", [{"dropout": 0.1}, {"rank": 0}, {"alpha": 0}, {"targets": []}, {"targets": "q_proj"}])
def test_settings_that_cannot_work_are_refused(lora):
    """With dropout the ratio would compare two different functions."""
    values = {"run": "r", "model": "m", "directory": "d", "algorithm": {"lora": lora}}

    with pytest.raises(ConfigError, match=r"algorithm\.lora"):
        make_config(values)
