"""The proxy over HTTP, by OpenAI's own client: what it answers, and what it refuses in words that the client knows."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import asynccontextmanager

import aiohttp
import openai
import pytest

from infra.clock import SystemClock
from infra.config import ProxyConfig
from infra.errors import Failure
from infra.inference.base import BadReply, PolicyOverloaded
from infra.inference.scripted import ScriptedPolicy
from schemas import transcript
from schemas.messages import Episode
from schemas.outcome import FailureKind, StopReason
from schemas.transcript import Sampling
from stages.run import open_episode
from stages.run.chat import read_call
from stages.run.outcome_post import MAX_DEPTH, OUTCOME_BYTES
from stages.run.proxy import Proxy
from stages.run.render import Renderer
from tests.chat_templates import QWEN_2
from tests.fast_clock import FastClock
from tests.logs import make_task, wait_until
from tests.model_directory import family_model
from tests.pools import pool_of

CLOCK = SystemClock()
TOOL = {"type": "function", "function": {"name": "look", "description": "look", "parameters": {"type": "object"}}}
LOOK = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"where": "north"}}\n</tool_call>'
USER = {"role": "user", "content": "find the key"}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(family_model(tmp_path_factory.mktemp("model"), QWEN_2, context=4096))


def policy_of(renderer, *texts, **changes):
    """Return an engine that says texts in turn, the last one again and again."""
    left = list(texts)

    def script(prompt, seed):
        return renderer.answer(left.pop(0) if len(left) > 1 else left[0]).tolist()

    return ScriptedPolicy(script, **changes)


def posting_as(address):
    """Return a session that has the key of an episode."""
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {address.api_key}"})


class World:
    """A proxy, the episodes that a test opens at it, and clients of them."""

    def __init__(self, renderer, policy, clock, **config):
        self.policy, self.clock = policy, clock
        pool = pool_of(clock, policy, wait_s=5.0)
        self.proxy = Proxy(policy=pool, renderer=renderer, clock=clock, config=ProxyConfig(**config))

    @asynccontextmanager
    async def opened(self, **task):
        """Open an episode; yields it, where it is, and a client."""
        fields = {"sampling": Sampling(max_tokens=200), "horizon": 9, **task}
        episode = Episode(task=make_task(**fields), host="local:", lease="l", messages=())
        async with self.proxy.opened(episode, await self.policy.info()) as (opened, address):
            key, url = address.api_key, address.base_url
            async with openai.AsyncOpenAI(api_key=key, base_url=url, max_retries=0) as client:
                yield opened, address, client


@asynccontextmanager
async def world_of(renderer, policy, clock=CLOCK, **config):
    world = World(renderer, policy, clock, **config)
    async with world.proxy:
        yield world


@asynccontextmanager
async def episode_of(renderer, *texts, clock=CLOCK, config=None, **task):
    policy = policy_of(renderer, *texts)
    async with world_of(renderer, policy, clock, **(config or {})) as world, world.opened(**task) as at:
        yield at


def checked(opened):
    record = opened.transcript()
    transcript.check(record)
    return record


def ask(client, *messages, **fields):
    return client.chat.completions.create(model="any", messages=list(messages or [USER]), **fields)


async def test_an_answer_is_what_the_policy_sampled(renderer):
    """The client reads it as OpenAI's; the record holds its ids with their log-probs."""
    async with episode_of(renderer, "the key is here") as (opened, _, client):
        answer = await ask(client, temperature=0.2, user="me")
        assert ["policy"] == [model.id async for model in client.models.list()]
    choice, record = answer.choices[0], checked(opened)

    assert ("assistant", "the key is here", "stop") == (
        choice.message.role,
        choice.message.content,
        choice.finish_reason,
    )
    ids = renderer.answer("the key is here")
    assert ids.tolist() == record.token_ids[record.mask_array == 1].tolist()
    assert (len(record.mask) - len(ids), len(ids)) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert {1.0} == {span.sampling.temperature for span in record.spans}, "the task's, whatever was asked for"


async def test_a_stream_is_put_together_to_the_same_answer(renderer):
    """Text, calls of tools, the reason, the count."""
    async with episode_of(renderer, LOOK) as (opened, _, client):
        whole = (await ask(client, tools=[TOOL])).choices[0]
        options = {"include_usage": True}
        chunks = [one async for one in await ask(client, tools=[TOOL], stream=True, stream_options=options)]
    text, calls, reasons = "", [], []
    for chunk in chunks[:-1]:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        calls += [(call.index, call.function.name, call.function.arguments) for call in delta.tool_calls or []]
        reasons.append(chunk.choices[0].finish_reason)

    assert (whole.message.content, "tool_calls") == (text, reasons[-1])
    wanted = [(at, call.function.name, call.function.arguments) for at, call in enumerate(whole.message.tool_calls)]
    assert wanted == calls == [(0, "look", json.dumps({"where": "north"}))]
    assert len(renderer.answer(LOOK)) == chunks[-1].usage.completion_tokens
    assert 2 == len(checked(opened).segments), "asked twice from the same point"


async def test_a_conversation_with_tools_is_one_segment(renderer):
    """The client's own objects go back as they came."""
    async with episode_of(renderer, LOOK, LOOK, "here") as (opened, _, client):
        messages = [{"role": "system", "content": "be brief"}, USER]
        while (said := (await ask(client, *messages, tools=[TOOL])).choices[0].message).tool_calls:
            results = [{"role": "tool", "tool_call_id": call.id, "content": "a door"} for call in said.tool_calls]
            messages += [said, *results]
    record = checked(opened)

    assert ((0,), ["look", "look", "message"]) == (record.segments, [turn.action for turn in record.turns])


async def test_calls_at_the_same_time_are_answered_side_by_side(renderer):
    """Sub-agents wait for nobody."""
    policy = policy_of(renderer, "yes")
    await policy.pause()
    async with world_of(renderer, policy) as world, world.opened() as (opened, _, client):
        asking = [asyncio.create_task(ask(client, {"role": "system", "content": name}, USER)) for name in "abc"]
        await wait_until(lambda: len(policy.calls), 3)
        await policy.resume()
        await asyncio.gather(*asking)

    assert 3 == len(checked(opened).segments)
    assert 3 == len({call.seed for call in policy.calls})


async def test_a_wrong_key_opens_nothing(renderer):
    """Nor does none, nor that of an episode that has ended; nobody is told which it was."""
    async with world_of(renderer, policy_of(renderer, "yes")) as world:
        async with world.opened() as (_, address, client):
            errors = []
            for key in ("x", address.api_key[:-1], f"{address.api_key}x"):
                with pytest.raises(openai.AuthenticationError) as caught:
                    await ask(client.with_options(default_headers={"Authorization": f"Bearer {key}"}))
                errors.append(caught.value.body)
            async with aiohttp.ClientSession() as session, session.get(f"{address.base_url}/models") as response:
                errors.append((await response.json())["error"])
        with pytest.raises(openai.AuthenticationError) as caught:
            async with openai.AsyncOpenAI(api_key=address.api_key, base_url=address.base_url) as late:
                await ask(late)

    assert [caught.value.body] * 4 == errors
    assert "invalid_api_key" == caught.value.code


async def test_a_call_that_hangs_up_while_its_answer_is_recorded_keeps_its_number(renderer):
    """The next one has another number, and so another draw; none is recorded twice under one."""
    taking, go = asyncio.Event(), threading.Event()
    async with episode_of(renderer, "yes", "no") as (opened, _, _client):
        loop, take = asyncio.get_running_loop(), opened._branches.take

        def slowly(*arguments):
            loop.call_soon_threadsafe(taking.set)
            assert go.wait(20)
            return take(*arguments)

        opened._branches.take = slowly
        call = read_call(b'{"messages": [{"role": "user", "content": "hello"}]}')
        hanging_up = asyncio.create_task(opened.complete(call))
        await taking.wait()
        hanging_up.cancel()
        await asyncio.gather(hanging_up, return_exceptions=True)
        again = asyncio.create_task(opened.complete(call))
        await asyncio.sleep(0)  # it asks, behind what is being recorded
        go.set()
        answer = await again
    assert answer.number == 1
    assert len(checked(opened).turns) == 2


async def test_two_episodes_have_keys_of_their_own(renderer):
    """What one says is in no other's record."""
    async with world_of(renderer, policy_of(renderer, "yes")) as world:
        async with world.opened() as (one, first, client), world.opened(sample=1) as (two, second, _):
            await ask(client)
            assert first.api_key != second.api_key
            assert first.api_key not in repr(first)
        assert 1 == len(one.transcript().turns)
        with pytest.raises(Failure, match="without an answer"):
            two.transcript()


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"logprobs": True}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}],
)
async def test_what_is_not_supported_is_refused_by_name(renderer, fields):
    """The client's error names the field, and nothing is recorded."""
    async with episode_of(renderer, "yes") as (opened, _, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, **fields)
    assert (next(iter(fields)), "unsupported_parameter") == (caught.value.param, caught.value.code)
    with pytest.raises(Failure, match="without an answer"):
        opened.transcript()


async def test_a_request_that_is_too_large_is_refused(renderer):
    """By its size, before it is read."""
    async with episode_of(renderer, "yes", config={"body_bytes": 2000}) as (_, _, client):
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client, {"role": "user", "content": "x" * 3000})
    assert (413, "request_too_large") == (caught.value.status_code, caught.value.code)


async def test_an_unknown_path_is_refused_in_the_same_words(renderer):
    """Embeddings, say."""
    async with episode_of(renderer, "yes") as (_, _, client):
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
            await client.embeddings.create(model="any", input="x")


async def test_limits_are_said_in_the_words_of_the_api(renderer):
    """An answer that is cut has the reason `length`; a call for which there is no room is an error with its limit."""
    async with episode_of(renderer, "a long answer", max_sampled_tokens=6) as (opened, _, client):
        bounded = await ask(client, max_completion_tokens=4)
        cut = await ask(client)
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client)

    assert [("a lo", "length"), ("a ", "length")] == [
        (answer.choices[0].message.content, answer.choices[0].finish_reason) for answer in (bounded, cut)
    ]
    assert ("limit_tokens", StopReason.TOKENS) == (caught.value.code, opened.stop)


async def test_a_conversation_longer_than_the_context_has_the_code_that_agents_look_for(renderer):
    """They compact their history then, and go on."""
    async with episode_of(renderer, "yes") as (opened, _, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, {"role": "user", "content": "x" * 5000})
    assert "context_length_exceeded" == caught.value.code
    with pytest.raises(Failure, match="does not fit") as failed:
        opened.transcript()
    assert FailureKind.INVALID_TASK is failed.value.kind


async def test_an_agent_that_hangs_up_ends_its_generation_and_nothing_is_recorded(renderer):
    """When it asks again it gets the draw that it did not wait for."""
    policy = policy_of(renderer, "yes")
    await policy.pause()
    async with world_of(renderer, policy) as world, world.opened() as (opened, _, client):
        asking = asyncio.create_task(ask(client))
        await wait_until(lambda: len(policy.calls), 1)
        asking.cancel()
        await wait_until(lambda: len(policy.cancelled), 1)
        await policy.resume()
        await ask(client)

    assert 1 == len(checked(opened).turns)
    assert 1 == len({(call.seed, call.request_id) for call in policy.calls})


async def test_what_runs_when_an_episode_ends_is_cancelled(renderer):
    """Its call is answered as any later one would be."""
    policy = policy_of(renderer, "yes")
    await policy.pause()
    async with world_of(renderer, policy) as world:
        async with world.opened() as (opened, _, client):
            asking = asyncio.create_task(ask(client))
            await wait_until(lambda: len(policy.calls), 1)
            await opened.end()
            with pytest.raises(openai.AuthenticationError):
                await asking
        assert 1 == len(policy.cancelled)


async def test_an_engine_without_a_usable_answer_is_said_to_be_unavailable(renderer):
    """And the episode has failed: its agent's later calls are not answered."""
    policy = policy_of(renderer, "yes")
    policy.fail_next(BadReply("3 ids came with 2 log-probs"))
    async with world_of(renderer, policy) as world, world.opened() as (opened, _, client):
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client)
        with pytest.raises(openai.AuthenticationError):
            await ask(client)
        assert await opened.until_over(0.0)

    assert (503, "policy_unavailable") == (caught.value.status_code, caught.value.code)
    with pytest.raises(Failure, match="3 ids came"):
        opened.transcript()


async def test_an_engine_that_is_busy_for_too_long_is_a_rate_limit(renderer):
    """It is waited for first, as in every episode."""
    policy = policy_of(renderer, "yes")
    policy.fail_next(*[PolicyOverloaded("429")] * 1000)
    clock = FastClock(factor=50.0)
    async with world_of(renderer, policy, clock) as world, world.opened() as (_, _, client):
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client)
    assert "policy_busy" == caught.value.code


async def test_an_episode_has_so_many_calls_at_once_and_no_more(renderer, monkeypatch):
    """The next one is told to come again."""
    monkeypatch.setattr(open_episode, "CALLS_AT_ONCE", 1)
    policy = policy_of(renderer, "yes")
    await policy.pause()
    async with world_of(renderer, policy) as world, world.opened() as (_, _, client):
        asking = asyncio.create_task(ask(client))
        await wait_until(lambda: len(policy.calls), 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client)
        await policy.resume()
        await asking
    assert "too_many_calls" == caught.value.code


def deep(levels):
    found = 1
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b"{}"),
        (400, b"[]"),
        (400, b"{"),
        (400, b'{"success": 1e999}'),
        (400, b'{"success": NaN}'),
        (400, {"success": 1.5}),
        (400, {"success": "yes"}),
        (400, {"reward": [1]}),
        (400, {"success": 1, "verdict": 1}),
        (400, {"detail": 2**70}),
        (400, {"detail": deep(MAX_DEPTH + 1)}),
        (400, b'{"detail": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"),
        (413, {"detail": "x" * OUTCOME_BYTES}),
    ],
)
async def test_an_outcome_that_no_record_could_hold_is_refused(renderer, status, body):
    """The episode goes on."""
    async with episode_of(renderer, "yes") as (opened, address, client):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with posting_as(address) as session, session.post(address.outcome_url, data=data) as response:
            assert status == response.status, await response.text()
        await ask(client)
    assert opened.outcome is None


async def test_an_outcome_closes_the_episode_and_is_answered_once_it_is_recorded(renderer):
    """A second one comes too late, and so does a call."""
    body = {"success": True, "reward": -0.5, "detail": deep(MAX_DEPTH)}
    async with episode_of(renderer, "yes") as (opened, address, client), posting_as(address) as session:
        posting = asyncio.create_task(session.post(address.outcome_url, json=body))
        await wait_until(lambda: opened.outcome is not None, True)
        with pytest.raises(openai.AuthenticationError):
            await ask(client)
        async with session.post(address.outcome_url, json=body) as response:
            assert 401 == response.status
        assert not posting.done()
        opened.settle(recorded=True)
        response = await posting
        assert (200, {"recorded": True}) == (response.status, await response.json())
    assert {**body, "success": 1.0} == opened.outcome


async def test_who_is_not_told_in_time_whether_an_outcome_is_recorded_is_told_that(renderer):
    """A worker that died publishes nothing, and the episode is made once more."""
    async with (
        episode_of(renderer, "yes", clock=FastClock(factor=600.0)) as (_, address, _),
        posting_as(address) as session,
        session.post(address.outcome_url, json={"success": 0}) as response,
    ):
        assert (503, "not_recorded") == (response.status, (await response.json())["error"]["code"])


async def test_nothing_listens_before_the_first_episode(renderer):
    """A worker that never sees such an episode opens no port."""
    async with world_of(renderer, policy_of(renderer, "yes")) as world:
        assert world.proxy.port is None
        async with world.opened(), world.opened(sample=1):
            assert world.proxy.port is not None


async def test_the_address_that_agents_are_told_is_configured(renderer):
    """Behind another name, with the port that was found."""
    url = "http://rollouts.example:{port}/"
    async with (
        world_of(renderer, policy_of(renderer, "yes"), url=url) as world,
        world.opened() as (_, address, _),
    ):
        here = url.replace("{port}", str(world.proxy.port))
        assert (f"{here}v1", f"{here}outcome") == (address.base_url, address.outcome_url)


async def test_an_address_that_is_taken_fails_the_episode(renderer):
    """Another worker on the same machine has the port; the error names the setting."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with world_of(renderer, policy_of(renderer, "yes"), port=taken.getsockname()[1]) as world:
            with pytest.raises(Failure, match=r"proxy\.port"):
                async with world.opened():
                    pass
