"""Sub-agents that speak at the same time to a real engine: the record's log-probs are those of its prompts."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import numpy as np
import pytest

from infra.clock import SystemClock
from infra.inference.vllm import VllmClient
from schemas import transcript
from schemas.messages import Episode
from schemas.transcript import Sampling
from stages.run.proxy import Proxy
from stages.run.render import Renderer
from tests import toys
from tests.harness_toys import team
from tests.logs import make_task
from tests.model_directory import word_model
from tests.pools import pool_of

CLOCK = SystemClock()


@pytest.fixture
async def engine(tmp_path):
    """A real engine with random weights; yields its client and its directory."""
    import torch

    from infra.inference.local_server.app import PolicyServer, describe, start_site
    from infra.inference.local_server.engine import Engine
    from infra.inference.local_server.weights import load_model
    from tests.tiny_llama import save_tiny_llama

    directory = save_tiny_llama(word_model(tmp_path / "model", toys.WORDS), seed=3)
    served = Engine(load_model(directory, torch.float32))
    served.start()
    runner, url = await start_site(PolicyServer(served, describe(directory, "policy")).application(), "127.0.0.1", 0)
    client = VllmClient(url, model="policy")
    yield client, directory
    await client.close()
    await runner.cleanup()
    served.stop()


@pytest.mark.integration
async def test_each_sampled_token_has_the_log_prob_that_it_has_behind_its_prompt(engine):
    """One forward pass over each segment gives the same, whoever spoke in between."""
    from tests.tiny_llama import plain_logprobs

    client, directory = engine
    renderer = Renderer(directory)
    pool = pool_of(CLOCK, client, digest=renderer.digest)
    task = make_task(sampling=Sampling(temperature=0.8, max_tokens=12))
    episode = Episode(task=task, host="local:", lease="l", messages=())
    async with Proxy(policy=pool, renderer=renderer, clock=CLOCK) as proxy:
        async with proxy.opened(episode, await client.info()) as (opened, address):
            await asyncio.to_thread(team, asdict(address))
        record = opened.transcript()

    transcript.check(record)
    assert (2, 4) == (len(record.segments), len(record.turns))
    for turn in record.turns:
        start = max(start for start in record.segments if start <= turn.start)
        prompt, answer = record.token_ids[start : turn.sampled], record.token_ids[turn.sampled : turn.stop]
        plain = plain_logprobs(directory, prompt.tolist(), answer.tolist(), temperature=0.8)
        np.testing.assert_allclose(record.logprob_array[turn.sampled : turn.stop], plain, atol=1e-4)
