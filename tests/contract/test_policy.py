"""What every policy client promises, checked on the twin, on the real local server and on a real vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from infra.inference.base import (
    UNKNOWN,
    ContextOverflow,
    ModelPathMissing,
    PolicyClient,
    PolicyRefused,
    PolicyUnreachable,
    VersionSpan,
    Weights,
)
from infra.inference.scripted import ScriptedPolicy, noise
from infra.inference.vllm import VllmClient
from schemas.transcript import Repetition, Sampling
from tests.served import put_in_place
from tests.vllm_server import vllm

VOCABULARY, CONTEXT = 61, 256
PROMPT = [5, 3, 8, 1]


@dataclass(kw_only=True)
class Subject:
    """One implementation and how to look into it."""

    client: PolicyClient
    #: Directories with the weights of versions 0 and 1.
    weights: tuple[Path, Path]
    #: Tokens sampled so far, over all requests.
    sampled: Callable[[], int]
    #: The engine ends at a stop sequence by itself; behind one that does not, the client cuts.
    knows_sequences: bool = True
    #: Requests that the engine still works on.
    in_flight: Callable[[], int]
    #: Number format of its weights.
    dtype: str = "float32"


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, at most 20 seconds."""
    try:
        async with asyncio.timeout(20):
            while not condition():  # the engine changes it, in a thread of its own
                await asyncio.sleep(0)
    except TimeoutError as error:
        raise AssertionError(f"never happened: {what}") from error


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    from tests.tiny_llama import save_tiny_llama

    root = tmp_path_factory.mktemp("models")
    return save_tiny_llama(root / "0", seed=0), save_tiny_llama(root / "1", seed=1)


@pytest.fixture(scope="module")
def real_vllm(tmp_path_factory):
    from tests.tiny_llama import save_tiny_llama

    # Heads of 32 places: the smallest that vLLM's attention takes on a processor.
    root = tmp_path_factory.mktemp("vllm")
    # On a processor it cannot exchange weights that are tied.
    weights = tuple(save_tiny_llama(root / str(seed), seed=seed, hidden=128, tied=False) for seed in (0, 1))
    with vllm(weights[0], root / "log", "--skip-tokenizer-init", max_model_len=CONTEXT) as server:
        yield server, weights


SUBJECTS = [
    "twin",
    *(pytest.param(dtype, marks=pytest.mark.integration) for dtype in ("float32", "int8")),
    pytest.param("vllm", marks=[pytest.mark.integration, pytest.mark.slow]),
]


@pytest.fixture(params=SUBJECTS)
async def subject(request, tmp_path) -> AsyncIterator[Subject]:
    if request.param == "twin":
        twin = ScriptedPolicy(noise(VOCABULARY, CONTEXT), max_model_len=CONTEXT)
        yield Subject(
            client=twin,
            weights=(tmp_path, tmp_path),
            sampled=lambda: twin.sampled,
            in_flight=lambda: len(twin._running),
        )
        return
    if request.param == "vllm":
        server, weights = request.getfixturevalue("real_vllm")
        async with VllmClient(server.url) as client:
            await put_in_place(client, weights[0], 0, "")
            yield Subject(
                client=client,
                weights=weights,
                sampled=lambda: server.sampled,
                in_flight=lambda: server.in_flight,
                knows_sequences=False,
            )
        return
    from infra.inference.local_server.app import PolicyServer, describe, start_site
    from infra.inference.local_server.engine import Engine
    from infra.inference.local_server.weights import dtype_named, load_model

    weights = request.getfixturevalue("model_dirs")
    engine = Engine(load_model(weights[0], dtype_named(request.param)))
    runner, url = await start_site(PolicyServer(engine, describe(weights[0], "policy")).application(), "127.0.0.1", 0)
    engine.start()
    async with VllmClient(url) as client:
        yield Subject(
            client=client,
            weights=weights,
            sampled=lambda: engine.stats.sampled_tokens,
            in_flight=lambda: len(engine._running) + len(engine._waiting),
            dtype=request.param,
        )
    await asyncio.to_thread(engine.stop)
    await runner.cleanup()


async def test_an_answer_has_a_logprob_and_a_version_for_each_id(subject):
    """Ids, log-probs and spans have one length, and the limit of tokens ends the answer as `length`."""
    answer = await subject.client.generate(PROMPT, Sampling(), seed=1, request_id="a", max_tokens=7)
    assert len(answer.token_ids) == len(answer.logprobs) == 7
    assert (answer.token_ids.dtype, answer.logprobs.dtype) == (np.int32, np.float32)
    assert np.all(answer.logprobs <= 0)
    assert answer.versions == (VersionSpan(start=0, stop=7, version=0),)
    assert answer.finish_reason == "length"


async def test_the_smaller_limit_of_tokens_counts(subject):
    """The turn's limit and the sampling parameters' limit are both upper bounds."""
    answer = await subject.client.generate(PROMPT, Sampling(max_tokens=2), seed=1, request_id="a", max_tokens=7)
    assert len(answer.token_ids) == 2


async def test_one_seed_gives_one_answer_in_any_company(subject):
    """The same prompt and seed give the same ids alone and among others; another seed gives others."""
    alone = await subject.client.generate(PROMPT, Sampling(), seed=7, request_id="a", max_tokens=12)
    crowd = await asyncio.gather(
        *(
            subject.client.generate(PROMPT, Sampling(), seed=seed, request_id=str(seed), max_tokens=12)
            for seed in range(16)
        )
    )
    np.testing.assert_array_equal(alone.token_ids, crowd[7].token_ids)
    np.testing.assert_allclose(alone.logprobs, crowd[7].logprobs, atol=1e-4)
    assert len({tuple(answer.token_ids) for answer in crowd}) > 10


async def test_a_prompt_may_be_an_array(subject):
    """A list and an array of ids are one prompt."""
    first = await subject.client.generate(PROMPT, Sampling(), seed=3, request_id="a", max_tokens=4)
    second = await subject.client.generate(
        np.array(PROMPT, dtype=np.int64), Sampling(), seed=3, request_id="b", max_tokens=4
    )
    np.testing.assert_array_equal(first.token_ids, second.token_ids)


async def test_a_stop_id_ends_the_answer_and_belongs_to_it(subject):
    """Nothing comes after the first stop id, which is the last id of the answer."""
    free = await subject.client.generate(PROMPT, Sampling(), seed=2, request_id="a", max_tokens=20)
    stop = int(free.token_ids[9])
    answer = await subject.client.generate(
        PROMPT, Sampling(), seed=2, request_id="b", max_tokens=20, stop_token_ids=(stop,)
    )
    first = free.token_ids.tolist().index(stop)
    np.testing.assert_array_equal(answer.token_ids, free.token_ids[: first + 1])
    assert answer.finish_reason == "stop"


async def test_a_stop_sequence_ends_the_answer_and_belongs_to_it(subject):
    """Ids alone would end it elsewhere; where they stand one behind the other it ends, and says so."""
    free = await subject.client.generate(PROMPT, Sampling(), seed=2, request_id="a", max_tokens=20)
    pair = tuple(free.token_ids.tolist()[9:11])
    sampling = Sampling(stop_sequences=((VOCABULARY, VOCABULARY), pair))
    sampled = subject.sampled()
    answer = await subject.client.generate(PROMPT, sampling, seed=2, request_id="b", max_tokens=20)
    count = len(answer.token_ids)
    assert count <= 11
    assert answer.finish_reason == "stop_sequence"
    assert tuple(answer.token_ids.tolist()[-2:]) == pair
    np.testing.assert_array_equal(answer.token_ids, free.token_ids[:count])
    np.testing.assert_allclose(answer.logprobs, free.logprobs[:count], atol=1e-4)
    assert subject.sampled() - sampled == (count if subject.knows_sequences else 20)


async def test_an_answer_that_loops_is_ended(subject):
    """With as few repetitions as there can be, ids that come twice in a row are a loop, and none is sampled after."""
    rule = Repetition(max_pattern_size=8, min_count=2)
    sampled = subject.sampled()
    answers = [
        await subject.client.generate(PROMPT, Sampling(repetition=rule), seed=seed, request_id="a", max_tokens=200)
        for seed in range(4)
    ]
    assert {answer.finish_reason for answer in answers} == {"repetition"}
    for ids in (answer.token_ids.tolist() for answer in answers):
        assert any(ids[-size:] == ids[-2 * size : -size] for size in range(1, 9))
    assert subject.sampled() - sampled == sum(len(answer.token_ids) for answer in answers)


async def test_a_prompt_that_fills_the_context_is_an_overflow(subject):
    """No token fits behind the prompt: an error of its own, so that the episode ends as truncated."""
    with pytest.raises(ContextOverflow):
        await subject.client.generate([1] * CONTEXT, Sampling(), seed=1, request_id="a")


async def test_an_answer_ends_at_the_end_of_the_context(subject):
    """The context's last place is used, and then the answer ends as `length`."""
    answer = await subject.client.generate([1] * (CONTEXT - 3), Sampling(), seed=1, request_id="a")
    assert (len(answer.token_ids), answer.finish_reason) == (3, "length")


async def test_an_empty_prompt_is_refused(subject):
    """A policy needs something to continue."""
    with pytest.raises(PolicyRefused):
        await subject.client.generate([], Sampling(), seed=1, request_id="a")


async def test_no_room_for_tokens_is_refused(subject):
    """A used-up token budget is the caller's mistake, not an empty answer."""
    with pytest.raises(PolicyRefused):
        await subject.client.generate(PROMPT, Sampling(), seed=1, request_id="a", max_tokens=0)


async def test_info_says_what_samples(subject):
    """Context, version, number format and log-prob mode are known before a run."""
    info = await subject.client.info()
    assert (info.max_model_len, info.version) == (CONTEXT, 0)
    assert (info.dtype, info.logprobs_mode) == (subject.dtype, "processed_logprobs")


async def test_a_score_is_what_the_weights_in_place_say_to_the_prompt(subject):
    """A number for each id behind the first, the same at every call, and another one by other weights."""
    prompt = np.array([5, 3, 8, 1, 1, 9], np.int32)
    before = await subject.client.score(prompt)
    assert (before.shape, before.dtype) == ((5,), np.float32)
    assert np.all(before <= 0)
    # Neither what is cached of the prompt changes it, nor what is asked meanwhile.
    asking = asyncio.create_task(subject.client.generate(prompt, Sampling(), seed=1, request_id="a", max_tokens=8))
    np.testing.assert_allclose(await subject.client.score(prompt), before, atol=1e-4)
    await asking
    await put_in_place(subject.client, subject.weights[1], 1, "trained")
    assert np.abs(await subject.client.score(prompt) - before).mean() > 0.1


async def test_a_score_in_a_pause_is_there_where_the_engine_says_so(subject):
    """Where it does not, the score comes behind the pause."""
    await subject.client.pause("keep")
    asking = asyncio.create_task(subject.client.score(PROMPT))
    if not (await subject.client.info()).scores_paused:
        await subject.client.resume()
    assert (await asking).shape == (len(PROMPT) - 1,)
    await subject.client.resume()


async def test_a_prompt_with_nothing_to_score_is_refused(subject):
    """The first id has nothing before it."""
    with pytest.raises(PolicyRefused):
        await subject.client.score([5])


async def test_weights_can_be_called_nobodys(subject):
    """So no task is sampled by them."""
    await subject.client.label(UNKNOWN)
    assert (await subject.client.info()).weights == UNKNOWN
    await subject.client.label(Weights(0))


async def test_a_change_of_weights_inside_an_answer_shows_in_its_spans(subject):
    """Pause (keep), load, resume: the answer goes on, and its later tokens carry the new version and its run."""
    before = subject.sampled()
    task = asyncio.create_task(subject.client.generate(PROMPT, Sampling(), seed=1, request_id="a", max_tokens=200))
    await until(lambda: subject.sampled() > before, "the first token")
    await subject.client.pause("keep")
    at_pause = subject.sampled() - before
    await subject.client.load(subject.weights[1], 1, "trained")
    assert (await subject.client.info()).weights == Weights(1, "trained")
    assert not task.done()
    await subject.client.resume()
    answer = await task
    assert answer.versions == (
        VersionSpan(start=0, stop=at_pause, version=0),
        VersionSpan(start=at_pause, stop=200, version=1, run="trained"),
    )


async def test_nothing_is_sampled_during_a_pause(subject):
    """A request that arrives in a pause waits for its end."""
    await subject.client.pause("keep")
    before = subject.sampled()
    task = asyncio.create_task(subject.client.generate(PROMPT, Sampling(), seed=1, request_id="a", max_tokens=3))
    await subject.client.info()
    assert not task.done()
    assert subject.sampled() == before
    await subject.client.resume()
    assert len((await task).token_ids) == 3


async def test_an_aborting_pause_ends_answers_with_what_they_have(subject):
    """Mode `abort`: the ids sampled until then come back, marked."""
    before = subject.sampled()
    task = asyncio.create_task(subject.client.generate(PROMPT, Sampling(), seed=1, request_id="a", max_tokens=200))
    await until(lambda: subject.sampled() > before, "the first token")
    await subject.client.pause("abort")
    answer = await task
    assert answer.finish_reason == "abort"
    assert 0 < len(answer.token_ids) == subject.sampled() - before < 200
    await subject.client.resume()


async def test_a_waiting_pause_lets_answers_end(subject):
    """Mode `wait`: the pause begins when what runs has ended by itself."""
    before = subject.sampled()
    task = asyncio.create_task(subject.client.generate(PROMPT, Sampling(), seed=1, request_id="a", max_tokens=50))
    await until(lambda: subject.sampled() > before, "the first token")
    await subject.client.pause("wait")
    assert subject.in_flight() == 0
    assert len((await task).token_ids) == 50
    await subject.client.resume()


async def test_weights_are_not_changed_under_running_requests(subject):
    """Loading without a pause is refused, since nobody could say which weights sampled a token."""
    with pytest.raises(PolicyRefused):
        await subject.client.load(subject.weights[1], 1)
    assert (await subject.client.info()).version == 0


async def test_weights_that_do_not_exist_are_named(subject, tmp_path):
    """The error has its own type, the version stays, and the engine goes on."""
    await subject.client.pause()
    with pytest.raises(ModelPathMissing, match="nowhere"):
        await subject.client.load(tmp_path / "nowhere", 1)
    await subject.client.resume()
    assert (await subject.client.info()).version == 0
    await subject.client.generate(PROMPT, Sampling(), seed=1, request_id="a", max_tokens=2)


async def test_cancelling_ends_the_generation_in_the_engine(subject):
    """Nobody pays for an answer that nobody waits for."""
    before = subject.sampled()
    task = asyncio.create_task(subject.client.generate(PROMPT, Sampling(), seed=1, request_id="a", max_tokens=240))
    await until(lambda: subject.sampled() > before, "the first token")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: subject.in_flight() == 0, "the engine drops the request")
    assert subject.sampled() - before < 240


async def test_nobody_at_the_address_is_unreachable():
    """The error says where it looked."""
    async with VllmClient("http://127.0.0.1:1") as client:
        with pytest.raises(PolicyUnreachable, match=r"127\.0\.0\.1:1"):
            await client.info()


async def test_the_twin_fails_as_told():
    """Injected errors come one by one, then the script goes on."""
    twin = ScriptedPolicy(lambda _prompt, _seed: [4, 2])
    twin.fail_next(PolicyUnreachable("the engine is down"))
    with pytest.raises(PolicyUnreachable):
        await twin.generate(PROMPT, Sampling(), seed=1, request_id="a")
    answer = await twin.generate(PROMPT, Sampling(), seed=1, request_id="b")
    assert answer.token_ids.tolist() == [4, 2]
    assert [call.request_id for call in twin.calls] == ["a", "b"]
