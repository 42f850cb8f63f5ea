"""Int8 layers against the float layers they take the place of, alone and in the engine."""

from __future__ import annotations

import gc
import re
import weakref
from typing import get_args

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel  # noqa: E402

from infra.config import load  # noqa: E402
from infra.errors import ConfigError  # noqa: E402
from infra.inference.base import NumberFormat, PolicyRefused, Weights  # noqa: E402
from infra.inference.local_server.app import serving  # noqa: E402
from infra.inference.local_server.engine import Engine, Request  # noqa: E402
from infra.inference.local_server.int8 import LARGEST, Int8Linear, channel_scales, int8_layers, quantise  # noqa: E402
from infra.inference.local_server.weights import DTYPES, load_model, read_weights, swap_weights  # noqa: E402
from rollmill.commands.policy import serve  # noqa: E402
from schemas.transcript import Sampling  # noqa: E402
from tests.tiny_llama import VOCABULARY, plain_logprobs, tiny_llamas  # noqa: E402

WAIT_S = 30

MATRICES = arrays(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, max_side=8),
    elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tiny_llamas(tmp_path_factory.mktemp("models"))


def layer(weight, bias=None):
    """Return a float layer with these weights."""
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight.data = torch.tensor(weight)
    if bias is not None:
        made.bias.data = torch.tensor(bias)
    return made.requires_grad_(False)


def rounded(directory, target):
    """Write the float model whose linear layers hold exactly what int8 makes of those of a directory."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, each in model.named_modules():
        if isinstance(each, torch.nn.Linear) and name != "lm_head":
            scale = channel_scales(each.weight).unsqueeze(1)
            each.weight.data = (each.weight / scale).round() * scale
    model.save_pretrained(target)
    return target


def state(model):
    """Return copies of all that a model computes with."""
    return [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@given(MATRICES)
def test_no_weight_is_off_by_more_than_half_a_step_of_its_channel(weight):
    """The largest weight of a channel is as far out as int8 goes, and what is zero stays zero."""
    subject = Int8Linear(layer(weight))
    scale = subject.scale.numpy()[:, None]
    found = scale * subject.weight.numpy()

    assert np.all(np.abs(found - weight) <= 0.5001 * scale)
    assert np.all(found[weight == 0] == 0)
    peaks = np.abs(subject.weight.numpy().astype(int)).max(axis=1)
    assert set(peaks) <= {0, LARGEST}
    assert np.array_equal(peaks == 0, np.abs(weight).max(axis=1) == 0)


@given(MATRICES, st.data())
def test_a_layer_computes_with_the_rounded_weights_and_nothing_else_is_rounded(weight, data):
    """What comes in, the sum and the bias stay float32."""
    values = data.draw(arrays(np.float32, (3, weight.shape[1]), elements=st.floats(-100, 100, width=32)))
    bias = np.linspace(-1, 1, weight.shape[0], dtype=np.float32)
    subject = Int8Linear(layer(weight, bias))

    found = subject(torch.tensor(values))

    exact = subject.scale.double().unsqueeze(1) * subject.weight.double()
    expected = functional.linear(torch.tensor(values).double(), exact, torch.tensor(bias).double())
    largest = float(np.abs(values).max() * np.abs(weight).max() * weight.shape[1]) + 1
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("value", [1e-45, 1e-38, 3e38])
def test_weights_at_the_ends_of_float32_come_through(value):
    """No scale overflows, and one too small to be had is a channel of zeros."""
    subject = Int8Linear(layer(np.array([[value, -value]], dtype=np.float32)))

    assert subject(torch.ones(1, 2)).item() == 0
    assert subject(torch.tensor([[1.0, 0.0]])).item() == pytest.approx(value, rel=0.01, abs=1e-40)


def test_the_weights_of_linear_layers_take_a_quarter(models):
    """Scales are what there is beside it, and the float weights are gone."""
    model = load_model(models["plain"], torch.float32)
    floats = [each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear) and name != "lm_head"]
    before = sum(each.weight.nbytes for each in floats)
    gone = [weakref.ref(each.weight) for each in floats]
    del floats

    quantise(model)
    gc.collect()

    layers = int8_layers(model).values()
    after = sum(tensor.nbytes for each in layers for tensor in (*each.parameters(), *each.buffers()))
    assert after == before / 4 + sum(4 * each.out_features for each in layers)
    assert [each() for each in gone] == [None] * len(gone)


@pytest.mark.parametrize("name", ["plain", "grouped"])
def test_embeddings_norms_and_the_output_layer_stay_float(models, name):
    """Names and shapes are those of the float model, and tied layers stay one tensor."""
    model, whole = load_model(models[name], torch.int8), load_model(models[name], torch.float32)

    found, expected = model.state_dict(), whole.state_dict()
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in expected.items()}
    small = {key for key, value in found.items() if value.dtype == torch.int8}
    assert small == {key for key in found if "proj" in key}
    assert len(small) == 2 * 7
    assert all(torch.equal(found[key], expected[key]) for key in found.keys() - small)
    tied = found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    assert tied == (name == "plain")


def ask(engine, prompt, seed, max_tokens=12):
    request = Request(
        request_id=str(seed),
        prompt=np.array(prompt, dtype=np.int32),
        sampling=Sampling(),
        seed=seed,
        stop_token_ids=frozenset(),
        max_tokens=max_tokens,
    )
    return engine.submit(request)


@pytest.fixture
def make_engine(models):
    engines = []

    def make(name="plain"):
        engines.append(Engine(load_model(models[name], torch.int8)))
        engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


@pytest.mark.parametrize("name", ["plain", "grouped"])
def test_logprobs_are_those_of_the_rounded_weights(make_engine, models, name, tmp_path):
    """In a batch of prompts of many lengths, as transformers has them: nothing but the weights differs from float32."""
    engine = make_engine(name)
    directory = rounded(models[name], tmp_path / "rounded")
    prompts = [[(7 * place + length) % VOCABULARY for place in range(length)] for length in (1, 2, 5, 17, 64, 150)]
    futures = [ask(engine, prompt, seed) for seed, prompt in enumerate(prompts)]
    gaps = []
    for prompt, future in zip(prompts, futures, strict=True):
        answer = future.result(WAIT_S)
        ids = answer.token_ids.tolist()
        np.testing.assert_allclose(answer.logprobs, plain_logprobs(directory, prompt, ids), atol=1e-4)
        gaps.append(np.abs(answer.logprobs - plain_logprobs(models[name], prompt, ids)).mean())

    assert engine.dtype == "int8"
    assert 1e-3 < np.mean(gaps) < 0.2


def test_new_weights_are_quantised_as_they_are_put_in_place(make_engine, models):
    """A change of weights leaves the engine as if it had begun with them, its version aside."""
    changed, fresh = make_engine("plain"), make_engine("other")
    changed.pause("keep").result(WAIT_S)
    changed.reload(models["other"]).result(WAIT_S)
    changed.label(Weights(1, "r")).result(WAIT_S)
    changed.resume().result(WAIT_S)

    found, expected = (ask(engine, [3, 1, 4], seed=5).result(WAIT_S) for engine in (changed, fresh))
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert {span.version for span in found.versions} == {1}
    assert same(state(changed._model), state(fresh._model))


def test_new_weights_may_be_of_any_float_format(models, tmp_path):
    """Those of a trainer in bfloat16 become what a server has that begins with them."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(models["other"] / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((models["other"] / "config.json").read_bytes())
    model = load_model(models["plain"], torch.int8)

    swap_weights(model, read_weights(tmp_path))

    assert same(state(model), state(load_model(tmp_path, torch.int8)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_and_nothing_is_changed(models, value):
    """As integers they would pass for weights: the layer is named, at a change and at the start."""
    model = load_model(models["plain"], torch.int8)
    before = state(model)
    last = "model.layers.1.mlp.down_proj.weight"
    tensors = read_weights(models["other"])
    tensors[last][3, 2] = value

    with pytest.raises(PolicyRefused, match=rf"not all numbers of \['{last}'\] are finite.*nothing was changed"):
        swap_weights(model, tensors)
    assert same(state(model), before)

    broken = load_model(models["other"], torch.float32)
    broken.get_parameter(last)[0, 0] = value
    with pytest.raises(PolicyRefused, match=last):
        quantise(broken)
    assert int8_layers(broken) == {}


def test_weights_of_another_model_change_nothing(models):
    """Shapes are compared before the first layer takes its own."""
    model = load_model(models["plain"], torch.int8)
    before = state(model)

    with pytest.raises(PolicyRefused, match="another model"):
        swap_weights(model, read_weights(models["grouped"]))
    assert same(state(model), before)


NO_LINEAR_LAYERS = r"GPT2LMHeadModel has weights elsewhere, such as .*c_attn.* as float32"


@pytest.fixture
def without_linear_layers(tmp_path):
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_model_without_linear_layers_is_refused(without_linear_layers):
    """The error names what would stay float, and what to do."""
    with pytest.raises(PolicyRefused, match=NO_LINEAR_LAYERS):
        load_model(without_linear_layers, torch.int8)


@pytest.mark.parametrize("asked", [("--dtype", "int8"), ("--set", "policy.dtype=int8")])
def test_the_command_serves_the_format_that_it_is_told(without_linear_layers, asked):
    """By an option or by a setting; a model that cannot be had so shows that it came through."""
    done = CliRunner().invoke(serve, ["--model", str(without_linear_layers), "--port", "0", *asked])

    assert isinstance(done.exception, ConfigError)
    assert re.search(NO_LINEAR_LAYERS, str(done.exception))


async def test_a_format_that_does_not_exist_is_refused_with_those_that_do(models):
    """Wherever it is named: by a caller, or in the settings."""
    with pytest.raises(PolicyRefused, match="'int4' is none of float32, bfloat16, float16, int8"):
        async with serving(models["plain"], dtype="int4"):
            pass
    with pytest.raises(ConfigError, match=r"policy\.dtype.*'int8'"):
        load(None, ("policy.dtype=int4",))


def test_every_format_that_can_be_set_can_be_loaded():
    """The settings know no torch, so their list is a second one."""
    assert get_args(NumberFormat) == tuple(DTYPES)
