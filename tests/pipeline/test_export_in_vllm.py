"""What a run exports is served by vLLM as it is."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from synthetic_run import decisions, memory_bus, record_trajectories, run_config, small_model

from infra.clock import SystemClock
from infra.inference.vllm import VllmClient
from schemas.transcript import Sampling
from stages.run.render import Renderer
from tests.tiny_llama import plain_logprobs
from tests.vllm_server import require_vllm, vllm
from trainer import loop
from trainer.export import export
from trainer.history import History

pytestmark = [pytest.mark.integration, pytest.mark.slow]


async def test_an_exported_model_serves_in_vllm_as_it_is(tmp_path):
    """Trained with adapters and a value head: folder, tokenizer and template are taken as they are, and it samples."""
    require_vllm()
    small_model(tmp_path / "model", hidden=64)  # vLLM takes no heads of fewer than 32 places
    algorithm = {"estimator": "gae", "lora": {"rank": 2}, "lr": 0.05}
    config = run_config(tmp_path, tmp_path / "model", algorithm=algorithm, stop={"max_steps": 2})
    bus = await memory_bus()
    await record_trajectories(bus, groups=20)
    async with asyncio.timeout(60):
        await loop.run(config, bus, SystemClock())
    export(History.of(await decisions(bus)), "last", tmp_path / "out")
    renderer = Renderer(tmp_path / "out")
    prompt = renderer.encode(renderer.render([{"role": "user", "content": "w1 w2"}])).tolist()

    with vllm(tmp_path / "out", tmp_path / "log", max_model_len=64) as server:
        async with VllmClient(server.url) as client:
            info = await client.info()
            answer = await client.generate(prompt, Sampling(max_tokens=12), seed=1, request_id="a")
            said = await client.score(prompt)
    assert (info.tokenizer_digest, info.dtype) == (renderer.digest, "float32")
    ids = answer.token_ids.tolist()
    np.testing.assert_allclose(answer.logprobs, plain_logprobs(tmp_path / "out", prompt, ids), atol=1e-4)
    np.testing.assert_allclose(said, plain_logprobs(tmp_path / "out", prompt[:1], prompt[1:]), atol=1e-4)
    apart = plain_logprobs(tmp_path / "model", prompt, ids) - answer.logprobs
    assert np.abs(apart).mean() > 0.01, "this may be the model that the run began with"
