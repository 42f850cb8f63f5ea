"""SmolLM2 on a real vLLM through the whole path: what the record says is what the engine sampled."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.smollm2 import model, untied
from infra.clock import SystemClock
from infra.config import Config, PolicyConfig
from infra.envhost.local import LocalEnvHost
from infra.inference.vllm import VllmClient
from infra.inference.weight_files import WEIGHTS_FILE
from infra.memory import MemoryBus
from producers.collect import outcomes
from producers.generated import GeneratedSource
from producers.publish import publish_source
from schemas import transcript
from schemas.control import RunManifest
from schemas.outcome import Completed
from schemas.topics import TABLE
from schemas.transcript import Sampling
from stages.handlers.registry import environment
from stages.pipeline import Outside, Pipeline
from stages.run.render import Renderer
from tests.recorder import recorded
from tests.served import put_in_place
from tests.vllm_server import require_vllm, vllm

pytestmark = [pytest.mark.integration, pytest.mark.slow]

log = logging.getLogger(__name__)

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"
CLOCK = SystemClock()
LIMIT_S = 900.0
"""A minute on two idle cores."""

TURNS, TURN_TOKENS = 3, 16
FAR_NATS, MEAN_NATS = 1e-3, 1e-5
"""Log-probs of vLLM and of transformers, both in float32: the furthest apart, and on average."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """SmolLM2 as it came, and moved a little, as a trainer would; the output layer is a tensor of its own."""
    require_vllm()
    folder = tmp_path_factory.mktemp("weights")
    came, moved = untied(folder / "came"), folder / "moved"
    shutil.copytree(came, moved)
    torch.manual_seed(0)
    tensors = load_file(moved / WEIGHTS_FILE)
    save_file(
        {name: tensor + 3e-3 * torch.randn_like(tensor) for name, tensor in tensors.items()},
        moved / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    return came, moved


@pytest.fixture(scope="module")
def server(weights, tmp_path_factory):
    with vllm(weights[0], tmp_path_factory.mktemp("vllm") / "log", max_model_len=512) as found:
        yield found


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """The example's family, installed as a package installs it."""
    information = tmp_path_factory.mktemp("site") / "rollmill_guess-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: rollmill-guess\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[rollmill.handlers]\nguess = guess:Guess\n")
    paths = [str(information.parent), str(EXAMPLE)]
    sys.path[:0] = paths
    yield
    for path in paths:
        sys.path.remove(path)


@asynccontextmanager
async def pipeline(url):
    """Give a log and the stages on it, with the engine at this address."""
    bus, config = MemoryBus(CLOCK), Config(policy=PolicyConfig(url=url, model=model()))
    await bus.start()
    await bus.create_topics(TABLE)
    async with VllmClient(url) as client, LocalEnvHost(environment) as host:
        stages = Pipeline(bus, CLOCK, config, Outside(host=host, policy=client, renderer=Renderer(model())))
        working = asyncio.create_task(stages.run())
        try:
            yield bus, client
        finally:
            stages.stop()
            await working
            await bus.close()


async def play(bus, run, count):
    """Publish guesses and return their trajectories, all completed."""
    limits = {"horizon": TURNS, "max_sampled_tokens": TURNS * TURN_TOKENS}
    wanted = RunManifest(run=run, seed=7, samples=2, sampling=Sampling(max_tokens=TURN_TOKENS), **limits)
    samples = await publish_source(bus, CLOCK, GeneratedSource("guess", {}, count=count // 2), wanted)
    found = await outcomes(bus, CLOCK, wanted, samples, limit_s=LIMIT_S)
    assert len(found) == count
    assert {type(one.outcome) for one in found} == {Completed}
    for one in found:
        transcript.check(one.transcript)
    return found


def recomputed(folder, trajectories):
    """Return the log-prob of every sampled token of each record, by one pass of transformers in float32."""
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for one in trajectories:
        record = one.transcript
        ids = torch.tensor(record.token_ids.tolist())
        with torch.inference_mode():
            logits = judge(ids[None]).logits[0].float().log_softmax(-1)
        sampled = np.flatnonzero(record.mask_array)
        found.append(logits[sampled - 1, ids[sampled]].numpy())
    return found


def episode(task):
    return f"{task.run}/{task.group}/{task.sample}/{task.attempt}"


async def test_what_vllm_sampled_is_what_the_record_says(server, weights, family):
    """50 episodes of up to three turns: every id and log-prob is the engine's own, and transformers finds the same."""
    async with recorded(server.url) as engine, pipeline(engine.url) as (bus, _):
        found = await play(bus, "r", 50)

    assert {len(one.transcript.turns) for one in found} > {1}, "guesses were right at once: nothing had several turns"
    for one in found:
        record, ids = one.transcript, one.transcript.token_ids.tolist()
        assert record.segments == (0,)
        said = engine.generations(episode(one.task))
        assert len(said) == len(record.turns)
        for turn, (asked, answer) in zip(record.turns, said, strict=True):
            assert asked["token_ids"] == ids[: turn.sampled]
            assert answer["token_ids"] == ids[turn.sampled : turn.stop]
            logprobs = np.array([entry["logprob"] for entry in answer["logprobs"]["content"]], np.float32)
            np.testing.assert_array_equal(record.logprob_array[turn.sampled : turn.stop], logprobs)
    apart = np.concatenate(
        [
            np.abs(one.transcript.logprob_array[one.transcript.mask_array == 1] - judged)
            for one, judged in zip(found, recomputed(weights[0], found), strict=True)
        ]
    )
    log.info("%d tokens, %.2e nats apart at most, %.2e on average", len(apart), apart.max(), apart.mean())
    assert apart.max() < FAR_NATS
    assert apart.mean() < MEAN_NATS


async def test_spans_switch_version_at_the_token_that_new_weights_sampled(server, weights, family):
    """Weights come in while answers are sampled: by transformers, each token is of the version that its span names."""
    async with pipeline(server.url) as (bus, client):
        playing = asyncio.create_task(play(bus, "s", 16))
        before = server.sampled
        while server.sampled < before + 64:
            await asyncio.sleep(0.01)  # another process samples
        await put_in_place(client, weights[1], 1, "")
        exchanged_ms = CLOCK.now_ms()
        found = await playing
        await put_in_place(client, weights[0], 0, "")

    by_version = [recomputed(folder, found) for folder in weights]
    old = new = switched = 0
    for place, one in enumerate(found):
        record, sampled = one.transcript, np.flatnonzero(one.transcript.mask_array)
        versions = np.concatenate([np.full(span.stop - span.start, span.version) for span in record.spans])
        assert np.all(np.diff(versions) >= 0)
        apart = [np.abs(record.logprob_array[sampled] - judged[place]) for judged in by_version]
        for turn in record.turns:
            within = (sampled >= turn.sampled) & (sampled < turn.stop)
            before, after = within & (versions == 0), within & (versions == 1)
            assert apart[0][before].max(initial=0.0) < FAR_NATS
            old += int(before.sum())
            if turn.began_ms > exchanged_ms:
                # Its prompt was computed anew: a prefix that older weights have filled is not found.
                assert not before.any()
                assert apart[1][after].max(initial=0.0) < FAR_NATS
                new += int(after.sum())
            elif before.any() and after.any():
                # The later ones stand on a cache that the old weights have filled, so they are of both, not of one.
                assert apart[0][after].max() > FAR_NATS
                switched += 1
    log.info("%d tokens by the old weights, %d by the new ones, %d turns switched", old, new, switched)
    assert min(old, new, switched) > 0
