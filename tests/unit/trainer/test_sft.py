import numpy as np
import pytest

from infra.errors import ConfigError
from trainer.models import Shape, create_wordlevel_model
from trainer.sft import Example, SftConfig, learning_rate, warm_start
from trainer.weights import load_model, weight_bytes, weights_digest


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the directory of a model of a few thousand parameters."""
    directory = tmp_path_factory.mktemp("model") / "m"
    shape = Shape(hidden=16, layers=1, heads=2, intermediate=32, context=64)
    create_wordlevel_model(directory, seed=0, words=[f"w{i}" for i in range(13)], shape=shape)
    return directory


def examples(seed=0):
    """Yield endless examples in which an 8 follows whatever was there."""
    draw = np.random.default_rng(seed)
    while True:
        length = int(draw.integers(4, 16))
        tokens = np.concatenate([draw.integers(7, 20, 2), np.full(length - 2, 8)])
        yield Example(tokens=tokens, mask=[0, 0, *[1] * (length - 2)])


QUICK = SftConfig(steps=40, batch=4, lr=2e-2, warmup=4)


def test_demonstrations_are_learnt(model, tmp_path):
    """The loss of a simple pattern falls close to nothing."""
    seen = []

    result = warm_start(model, tmp_path / "out", examples(), QUICK, seen.append)

    assert result.first_loss > 1.0
    assert result.last_loss < 0.2
    assert [p.step for p in seen] == list(range(1, 41))


def test_the_result_is_a_model_directory_like_the_first(model, tmp_path):
    """It loads, its digest is the one reported, and the tokenizer came along."""
    result = warm_start(model, tmp_path / "out", examples(), QUICK)

    assert weights_digest(weight_bytes(load_model(tmp_path / "out"))) == result.digest
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_the_same_examples_give_the_same_weights(model, tmp_path):
    """With one thread on the CPU."""
    first = warm_start(model, tmp_path / "a", examples(1), QUICK)
    second = warm_start(model, tmp_path / "b", examples(1), QUICK)

    assert first.digest == second.digest


def test_tokens_outside_the_mask_are_not_learnt(model, tmp_path):
    """An example without a token to learn is skipped; only such examples are an error."""
    nothing = (Example(tokens=[7, 8, 7], mask=[1, 0, 0]) for _ in range(1000))

    with pytest.raises(ConfigError, match="ran out"):
        warm_start(model, tmp_path / "out", nothing, QUICK)


def test_too_few_demonstrations_are_an_error_that_says_when(model, tmp_path):
    """Nothing is repeated in secret."""
    few = [next(examples()) for _ in range(8)]

    with pytest.raises(ConfigError, match="step 2 of 40"):
        warm_start(model, tmp_path / "out", few, QUICK)


def test_an_existing_target_is_not_overwritten(model):
    """The error names it."""
    with pytest.raises(ConfigError, match="exists"):
        warm_start(model, model, examples(), QUICK)


def test_the_rate_rises_then_falls_to_its_final_share():
    """Linear, then half a cosine."""
    config = SftConfig(steps=100, warmup=10, lr=1.0, final=0.1)

    assert learning_rate(0, config) == pytest.approx(0.1)
    assert learning_rate(9, config) == pytest.approx(1.0)
    assert learning_rate(55, config) == pytest.approx(0.55)
    assert learning_rate(100, config) == pytest.approx(0.1)
