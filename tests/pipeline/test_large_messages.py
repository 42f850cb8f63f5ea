"""Samples of several MiB on the whole path: in memory, and on a real Kafka with blobs in a directory."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from infra.blobs.directory import DirectoryBlobs
from infra.claims import claimed
from infra.clock import SystemClock
from infra.config import Config
from infra.envhost.local import LocalEnvHost
from infra.inference.base import Generation, VersionSpan
from infra.inference.scripted import ScriptedPolicy
from infra.kafka import KafkaBus
from infra.memory import MemoryBus
from infra.wire import Publisher
from producers.collect import outcomes
from rollmill.cli import cli
from schemas import transcript
from schemas.control import RunManifest
from schemas.outcome import Completed
from schemas.topics import EPISODES, ROLLOUTS, TABLE, TASKS, TRAJECTORIES
from schemas.transcript import Sampling
from stages.handlers.registry import environment
from stages.pipeline import Outside, Pipeline
from stages.run.render import Renderer
from tests import toys
from tests.logs import make_task, read_all
from tests.model_directory import word_model

TOKENS = 400_000
"""Length of the answer: 1.6 MB of ids, 1.6 MB of log-probs, 0.4 MB of mask."""

NOISE = random.Random(1).randbytes(1_500_000)
"""In the task: too large for a record by itself."""

PREFIX = "large-messages."
LIMIT_S = 120.0


class Talker(ScriptedPolicy):
    """An engine whose answers are long; it remembers them."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(lambda prompt, seed: (), max_model_len=1_000_000, tokenizer_digest=renderer.digest)
        self.said: list[Generation] = []
        self._words = [int(renderer.answer(word)[0]) for word in ("say", "something", "else", "hello")]

    async def _tokens(self, call, key):
        dice = np.random.default_rng(call.seed)
        answer = Generation(
            token_ids=dice.choice(self._words, TOKENS).astype(np.int32),
            logprobs=-dice.random(TOKENS, dtype=np.float32),
            finish_reason="stop",
            versions=(VersionSpan(start=0, stop=TOKENS, version=0),),
        )
        self.said.append(answer)
        return answer


@asynccontextmanager
async def opened(kind, request, folder: Path):
    """A log with a blob store, and every topic."""
    if kind == "memory":
        bus = MemoryBus()
    else:
        blobs = DirectoryBlobs(folder, SystemClock())
        await blobs.create()
        bus = KafkaBus(request.getfixturevalue("kafka"), prefix=PREFIX, blobs=blobs)
    await bus.start()
    try:
        await bus.create_topics(TABLE)
        yield bus
    finally:
        await bus.close()


@pytest.mark.parametrize("kind", ["memory", pytest.param("kafka", marks=pytest.mark.integration)])
async def test_a_sample_of_several_mebibytes_ends_as_any_other(kind, request, tmp_path, monkeypatch):
    """Every hop is a claim check; what comes out holds the very tokens that the engine sampled."""
    toys.install(tmp_path / "site", monkeypatch)
    renderer = Renderer(word_model(tmp_path / "model", toys.WORDS, context=1_000_000))
    policy, clock = Talker(renderer), SystemClock()
    large = make_task(
        family="toy",
        payload={"length": 1, "noise": NOISE},
        max_sampled_tokens=TOKENS + 1,
        sampling=Sampling(max_tokens=TOKENS + 1),
    )
    async with opened(kind, request, tmp_path / "blobs") as bus, LocalEnvHost(environment) as host:
        await Publisher(bus, clock, "test").publish(TASKS, large)
        pipeline = Pipeline(bus, clock, Config(), Outside(host=host, policy=policy, renderer=renderer))
        working = asyncio.create_task(pipeline.run())
        try:
            (found,) = await outcomes(bus, clock, RunManifest(run="test", seed=0, samples=1), 1, limit_s=LIMIT_S)
        finally:
            pipeline.stop()
            await asyncio.wait_for(working, LIMIT_S)
        records = [await read_all(bus, topic) for topic in (TASKS, EPISODES, ROLLOUTS, TRAJECTORIES)]
        blobs = {blob.digest: blob.size for blob in await bus.blobs.stock()}
        if kind == "kafka":
            await kept_by_the_command(bus.blobs, blobs, request.getfixturevalue("kafka"))

    (said,) = policy.said
    record = found.transcript
    sampled = record.mask_array == 1
    assert isinstance(found.outcome, Completed)
    assert large == found.task
    assert said.token_ids.tolist() == record.token_ids[sampled].tolist()
    assert said.logprobs.tolist() == record.logprob_array[sampled].tolist()
    transcript.check(record)
    assert [1, 1, 1, 1] == [len(each) for each in records]
    assert set(blobs) == {claimed(each[0]) for each in records}
    assert min(blobs.values()) > len(NOISE)


async def kept_by_the_command(store: DirectoryBlobs, blobs: dict[str, int], address: str) -> None:
    """A person keeps the run, looks at the store, and lets go again."""
    settings = (
        "--set",
        f"bus.bootstrap={address}",
        "--set",
        f"bus.prefix={PREFIX}",
        "--set",
        f"bus.blobs={store.root}",
    )

    async def called(*arguments: str):
        done = await asyncio.to_thread(CliRunner().invoke, cli, [*arguments, "--json", *settings])
        assert 0 == done.exit_code, done.output
        return json.loads(done.output.splitlines()[-1])

    assert {
        "run": "test",
        "records": 4,
        "kept": 4,
        "bytes": sum(blobs.values()),
        "lost": [],
    } == await called("keep", "test")
    assert {"test": set(blobs)} == dict(await store.pins())
    assert {"blobs": 4, "kept": {"test": 4}}.items() <= (await called("blobs", "status")).items()
    assert {"deleted": 0, "bytes": 0} == await called("blobs", "collect")
    assert {"run": "test", "released": True} == await called("keep", "test", "--release")
    assert {} == await store.pins()
