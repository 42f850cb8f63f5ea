"""The engine against plain transformers: one answer in any batch, with and without reuse, through weight changes."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from infra.inference.base import (  # noqa: E402
    ModelPathMissing,
    PolicyOverloaded,
    PolicyRefused,
    PolicyUnreachable,
    VersionSpan,
    Weights,
)
from infra.inference.local_server.engine import Engine, EngineLimits, Request  # noqa: E402
from infra.inference.local_server.weights import load_model, read_weights, swap_weights  # noqa: E402
from schemas.transcript import Sampling  # noqa: E402
from tests.tiny_llama import VOCABULARY, plain_logprobs, tiny_llamas  # noqa: E402

WAIT_S = 30


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tiny_llamas(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make_engine(models):
    engines = []

    def make(name="plain", *, start=True, **kwargs):
        limits = EngineLimits(**kwargs.pop("limits", {}))
        engine = Engine(load_model(models[name], torch.float32), limits=limits, **kwargs)
        engines.append(engine)
        if start:
            engine.start()
        return engine

    yield make
    for engine in engines:
        if engine._thread.is_alive():
            engine.stop()


def request(prompt, *, seed=0, max_tokens=8, sampling=None, stop=(), name="r"):
    return Request(
        request_id=name,
        prompt=np.array(prompt, dtype=np.int32),
        sampling=sampling or Sampling(),
        seed=seed,
        stop_token_ids=frozenset(stop),
        max_tokens=max_tokens,
    )


def prompt_of(length, seed):
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("name", ["plain", "grouped"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_a_plain_forward_pass(make_engine, models, name, temperature):
    """Batched prompts of many lengths, shared key-value heads included, agree with transformers to 1e-4."""
    engine = make_engine(name)
    prompts = [prompt_of(length, length) for length in (1, 2, 5, 17, 64, 150)]
    sampling = Sampling(temperature=temperature)
    futures = [
        engine.submit(request(prompt, seed=i, max_tokens=12, sampling=sampling)) for i, prompt in enumerate(prompts)
    ]
    for prompt, future in zip(prompts, futures, strict=True):
        answer = future.result(WAIT_S)
        expected = plain_logprobs(models[name], prompt, answer.token_ids.tolist(), temperature)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


def test_turns_of_an_episode_reuse_their_prefix_and_agree_with_a_fresh_engine(make_engine, models):
    """Reuse saves computing, and changes neither ids nor log-probs."""
    warm, cold = make_engine(), make_engine()
    context = prompt_of(20, 1)
    for turn in range(6):
        answer = warm.submit(request(context, seed=turn, max_tokens=3)).result(WAIT_S)
        cold.forget(recompute_running=False).result(WAIT_S)
        again = cold.submit(request(context, seed=turn, max_tokens=3)).result(WAIT_S)
        np.testing.assert_array_equal(answer.token_ids, again.token_ids)
        np.testing.assert_allclose(answer.logprobs, again.logprobs, atol=1e-4)
        context = [*context, *answer.token_ids.tolist(), *prompt_of(5, 100 + turn)]
    assert cold.stats.reused_tokens == 0
    # Each turn computes its 5 new ids, the last one sampled before, and 2 of its own 3.
    assert warm.stats.computed_tokens == 20 + 2 + 5 * 8
    expected = plain_logprobs(models["plain"], context[:-8], context[-8:-5])
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


def test_more_requests_than_slots_wait_their_turn(make_engine):
    """Forty requests over four slots all get what they would get alone."""
    small, large = make_engine(limits={"max_running": 4, "spare_slots": 0}), make_engine()
    asked = [request(prompt_of(3 + i % 7, i % 5), seed=i, max_tokens=5) for i in range(40)]
    futures = [(small.submit(one), large.submit(one)) for one in asked]
    for few, many in futures:
        np.testing.assert_array_equal(few.result(WAIT_S).token_ids, many.result(WAIT_S).token_ids)


def test_a_long_prompt_is_computed_in_pieces_beside_others(make_engine, models):
    """A step's token limit slows a long prompt down and changes nothing about it."""
    engine = make_engine(limits={"max_step_tokens": 16})
    long, short = prompt_of(200, 1), prompt_of(4, 2)
    slow = engine.submit(request(long, max_tokens=4))
    quick = engine.submit(request(short, max_tokens=4))
    assert len(quick.result(WAIT_S).token_ids) == 4
    answer = slow.result(WAIT_S)
    expected = plain_logprobs(models["plain"], long, answer.token_ids.tolist())
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    assert engine.stats.steps >= 200 // 16


def test_greedy_takes_the_likeliest_id(make_engine, models):
    """Temperature 0 gives the argmax, whatever the seed, with the log-prob at temperature 1."""
    engine = make_engine()
    prompt = prompt_of(9, 3)
    greedy = Sampling(temperature=0.0)
    first, second = (engine.submit(request(prompt, seed=seed, sampling=greedy)).result(WAIT_S) for seed in (1, 2))
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    expected = plain_logprobs(models["plain"], prompt, first.token_ids.tolist())
    np.testing.assert_allclose(first.logprobs, expected, atol=1e-4)


def test_new_weights_sample_new_logprobs_and_no_old_prefix_survives(make_engine, models):
    """After a load every prompt is computed with the new weights alone, and labelled with their version."""
    engine = make_engine()
    prompt = prompt_of(30, 4)
    engine.submit(request(prompt)).result(WAIT_S)
    engine.pause("keep").result(WAIT_S)
    engine.reload(models["other"]).result(WAIT_S)
    engine.label(Weights(5, "r")).result(WAIT_S)
    engine.resume().result(WAIT_S)
    answer = engine.submit(request([*prompt, 1], max_tokens=6)).result(WAIT_S)
    assert answer.versions == (VersionSpan(start=0, stop=6, version=5, run="r"),)
    expected = plain_logprobs(models["other"], [*prompt, 1], answer.token_ids.tolist())
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


def _pause_inside(engine, asked):
    """Submit, and pause once the request has its first token."""
    started = threading.Event()
    append = engine._append

    def watched(entry, token, logprob):
        started.set()
        return append(entry, token, logprob)

    engine._append = watched
    future = engine.submit(asked)
    assert started.wait(WAIT_S)
    engine.pause("keep").result(WAIT_S)
    return future


def test_recomputing_gives_running_requests_a_clean_context(make_engine, models):
    """With `recompute`, the tokens after a change have the log-probs of the new weights over the whole context."""
    engine = make_engine()
    prompt = prompt_of(12, 5)
    future = _pause_inside(engine, request(prompt, max_tokens=200))
    engine.reload(models["other"]).result(WAIT_S)
    engine.forget(recompute_running=True).result(WAIT_S)
    engine.label(Weights(1)).result(WAIT_S)
    engine.resume().result(WAIT_S)
    answer = future.result(WAIT_S)
    old, new = answer.versions
    assert (old.version, new.version) == (0, 1)
    ids = answer.token_ids.tolist()
    expected = plain_logprobs(models["other"], [*prompt, *ids[: new.start]], ids[new.start :])
    np.testing.assert_allclose(answer.logprobs[new.start :], expected, atol=1e-4)


def test_weights_without_a_version_sample_nothing(make_engine, models):
    """Between load and label the engine refuses to resume, so no token can carry the wrong version."""
    engine = make_engine()
    engine.pause("keep").result(WAIT_S)
    engine.reload(models["other"]).result(WAIT_S)
    with pytest.raises(PolicyRefused, match="version"):
        engine.resume().result(WAIT_S)
    engine.label(Weights(1)).result(WAIT_S)
    engine.resume().result(WAIT_S)
    assert engine.submit(request([1], max_tokens=1)).result(WAIT_S).versions[0].version == 1


def test_weights_of_another_model_change_nothing(make_engine, models):
    """The shapes are compared before the first tensor is copied."""
    engine = make_engine()
    before = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
    engine.pause("keep").result(WAIT_S)
    with pytest.raises(PolicyRefused, match="another model"):
        engine.reload(models["grouped"]).result(WAIT_S)
    engine.resume().result(WAIT_S)
    for name, tensor in engine._model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_change_nothing(models, value):
    """Every answer of theirs would fail."""
    model = load_model(models["plain"], torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = read_weights(models["other"])
    name = next(iter(tensors))
    tensors[name].view(-1)[3] = value
    with pytest.raises(PolicyRefused, match=rf"not all numbers of \['{name}'\] are finite.*nothing was changed"):
        swap_weights(model, tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_truncated_weights_file_is_refused(make_engine, models, tmp_path):
    """A file that was cut short is named, and the old weights go on."""
    whole = (models["other"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    engine = make_engine()
    engine.pause("keep").result(WAIT_S)
    with pytest.raises(PolicyRefused, match=r"model\.safetensors"):
        engine.reload(tmp_path).result(WAIT_S)
    engine.resume().result(WAIT_S)
    assert engine.submit(request([1], max_tokens=1)).result(WAIT_S).versions[0].version == 0


def test_a_directory_without_a_model_is_named(tmp_path):
    """The start says what is missing."""
    with pytest.raises(ModelPathMissing, match=r"config\.json"):
        load_model(tmp_path, torch.float32)


def test_a_full_queue_refuses(make_engine):
    """Beyond the limit of waiting requests the engine says so at once."""
    engine = make_engine(start=False, limits={"max_waiting": 2})
    engine.submit(request([1]))
    engine.submit(request([1]))
    with pytest.raises(PolicyOverloaded, match="2 requests wait"):
        engine.submit(request([1]))


def test_withdrawn_requests_leave_room(make_engine):
    """Cancelled futures free their place in the queue and their slot."""
    engine = make_engine(limits={"max_waiting": 2, "max_running": 1, "spare_slots": 0})
    for _ in range(5):
        running = engine.submit(request([1], max_tokens=250))
        waiting = engine.submit(request([2], max_tokens=250))
        running.cancel()
        waiting.cancel()
        # Two round trips through the engine's thread: it has passed the place where it looks for withdrawals.
        for _ in range(2):
            engine.abort(frozenset({"nobody"})).result(WAIT_S)
        assert len(engine.submit(request([3], max_tokens=2)).result(WAIT_S).token_ids) == 2


def test_a_forgotten_pause_ends_by_itself(make_engine):
    """The lease runs out, and the engine samples on."""
    engine = make_engine(limits={"pause_lease_s": 0.05})
    engine.pause("keep").result(WAIT_S)
    assert len(engine.submit(request([1], max_tokens=3)).result(WAIT_S).token_ids) == 3
    assert not engine.paused


def test_aborted_requests_answer_with_what_they_have(make_engine):
    """By name: the named one ends, the other goes on."""
    engine = make_engine()
    first = _pause_inside(engine, request([1, 2], max_tokens=200, name="first"))
    second = engine.submit(request([3], max_tokens=5, name="second"))
    assert engine.abort(frozenset({"first"})).result(WAIT_S) == 1
    answer = first.result(WAIT_S)
    assert answer.finish_reason == "abort"
    assert 0 < len(answer.token_ids) < 200
    engine.resume().result(WAIT_S)
    assert len(second.result(WAIT_S).token_ids) == 5


def test_a_broken_step_fails_its_requests_and_not_the_engine(make_engine):
    """The requests get the error; the next ones are served, from a clean cache."""
    engine = make_engine()
    forward = engine._forward

    def broken(*_):
        engine._forward = forward
        raise RuntimeError("out of memory")

    engine._forward = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.submit(request([1, 2, 3])).result(WAIT_S)
    assert len(engine.submit(request([1, 2, 3])).result(WAIT_S).token_ids) == 8


def test_stopping_answers_everyone(make_engine):
    """Nobody waits for a thread that is gone."""
    engine = make_engine()
    futures = [engine.submit(request([i], max_tokens=250)) for i in range(3)]
    engine.stop()
    for future in futures:
        with pytest.raises(PolicyUnreachable):
            future.result(WAIT_S)
    assert engine.fault is not None


def test_a_cache_that_holds_nothing_is_refused(make_engine):
    """The error says how much one request needs."""
    with pytest.raises(PolicyRefused, match="cache_bytes"):
        make_engine(limits={"cache_bytes": 1000})


def test_a_stopped_engine_lets_go_of_its_weights(models):
    """Whatever still holds the engine: an HTTP server of a process that had many holds them all."""
    model = load_model(models["plain"], torch.float32)
    weights = weakref.ref(model.get_input_embeddings().weight)
    engine = Engine(model)
    del model
    engine.start()
    engine.stop()
    gc.collect()

    assert weights() is None
    assert (engine.max_model_len, engine.dtype) == (256, "float32")
