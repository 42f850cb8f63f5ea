"""An engine is killed while episodes run on two: they go on at the other one, and nobody can tell from their record."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from infra.clock import SystemClock
from infra.envhost.local import LocalEnvHost
from infra.inference.base import PolicyError
from infra.inference.pool import PolicyPool
from infra.inference.vllm import VllmClient
from schemas import transcript
from schemas.control import Backend
from stages.handlers.keydoor import WORDS
from stages.handlers.registry import environment
from stages.init.stage import InitStage
from stages.run.render import Renderer
from stages.run.stage import RunStage
from tests.logs import make_task, wait_until
from tests.model_directory import word_model
from tests.pools import guards_on

pytestmark = pytest.mark.integration

EPISODES = 32
TOKEN_S = 0.02
LIMIT_S = 120.0
CLOCK = SystemClock()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return word_model(tmp_path_factory.mktemp("model"), WORDS)


@asynccontextmanager
async def engine(model):
    """Run a scripted engine as a process; gives the process and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--model", str(model), "--port", str(port), "--token-s", str(TOKEN_S))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.chaos.policy_server", *options)
    try:
        url = f"http://127.0.0.1:{port}"
        async with VllmClient(url) as client:
            await wait_until(lambda: answers(client), True, limit_s=60)
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def answers(client):
    try:
        await client.health()
    except PolicyError:
        return False
    return True


@asynccontextmanager
async def stage_on(host, model, urls):
    """Give a RUN stage with a pool of engines."""
    renderer = Renderer(model)
    pool = PolicyPool(VllmClient, CLOCK, guards_on(CLOCK), tokenizer_digest=renderer.digest)
    pool.have(Backend(name=f"engine-{number}", url=url) for number, url in enumerate(urls))
    yield RunStage(hosts=host, policy=pool, renderer=renderer, clock=CLOCK, worker="run-test")
    await pool.close()


async def play(host, stage, run):
    """Return the running episodes of a run."""
    running = []
    for number in range(EPISODES):
        task = make_task(
            family="keydoor", payload={"size": 4}, run=run, group=f"g{number // 4}", sample=number % 4, seed=number // 4
        )
        opened = await InitStage(host).handle(task)
        await opened.settle()
        running.append(asyncio.create_task(stage.handle(opened.message)))
    return running


def record_of(done):
    """Return what an episode's record says, without times."""
    found = done.message.transcript
    transcript.check(found)
    turns = [msgspec.structs.replace(turn, began_ms=0, generated_ms=0, ended_ms=0) for turn in found.turns]
    return found.token_ids.tolist(), found.mask, found.logprobs, turns, done.message.verdict


async def test_episodes_whose_engine_is_killed_end_with_the_record_that_they_would_have_had(model):
    """32 on two engines; one dies with generations in flight. All finish, none starts again, none is failed for it."""
    async with AsyncExitStack() as open_:
        host = await open_.enter_async_context(LocalEnvHost(environment))
        (dying, first), (_, second) = [await open_.enter_async_context(engine(model)) for _ in range(2)]
        stage = await open_.enter_async_context(stage_on(host, model, (first, second)))
        undisturbed = await asyncio.wait_for(asyncio.gather(*await play(host, stage, "r")), LIMIT_S)
        running = await play(host, stage, "r2")
        await wait_until(lambda: sum(task.done() for task in running), 2, limit_s=LIMIT_S)
        assert dying.returncode is None
        dying.kill()
        disturbed = await asyncio.wait_for(asyncio.gather(*running), LIMIT_S)

    moved = [done for done in disturbed if len(done.message.backend.split()) == 2]
    assert {first, second} == {url for done in undisturbed for url in done.message.backend.split()}
    assert moved, "the kill came when no episode was between its turns at that engine"
    assert [record_of(done) for done in disturbed] == [record_of(done) for done in undisturbed]
