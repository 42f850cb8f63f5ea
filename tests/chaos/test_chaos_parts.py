"""The chaos on a real Kafka stands on these: a plan that is its seed's, and a policy whose answers are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from infra.inference.base import PolicyRefused
from infra.inference.vllm import VllmClient
from schemas.transcript import Sampling
from stages.handlers.keydoor import WORDS
from stages.run.render import Renderer
from tests.chaos.kill_plan import draw
from tests.chaos.policy_server import serving, wanderer
from tests.model_directory import word_model

INSTANCES = {"broker": 1, "run": 2, "trainer": 1}


def plan(seed):
    return draw(seed, INSTANCES, late=("trainer",), again=("run",), more=2, window_s=30.0)


def test_a_seed_decides_who_is_killed_when():
    """Another seed is another plan, and the same one the same: a failure can be looked at again."""
    assert plan(1) == plan(1)
    assert len({tuple(plan(seed)) for seed in range(20)}) == 20


@pytest.mark.parametrize("seed", range(20))
def test_every_service_is_killed_in_time_and_some_again(seed):
    """In order of time, each at least once, and only instances that there are."""
    kills = plan(seed)

    assert {"broker": 1, "run": 3, "trainer": 1} == Counter(kill.service for kill in kills)
    assert kills == sorted(kills, key=lambda kill: kill.at_s)
    assert all(0 <= kill.at_s <= 30 and kill.instance < INSTANCES[kill.service] for kill in kills)
    assert all(kill.at_s >= 20 for kill in kills if kill.service == "trainer")


async def test_the_scripted_policy_says_the_same_over_http_and_takes_versions(tmp_path):
    """Its answers are those of the twin in this process, before and after new weights, by our own client."""
    model = word_model(tmp_path / "model", WORDS)
    renderer, twin = Renderer(model), wanderer(model)
    prompt = renderer.encode(renderer.render([{"role": "user", "content": "find key north"}]))

    async def answer(policy, seed):
        given = {"seed": seed, "request_id": "a", "stop_token_ids": renderer.stop_ids}
        return await policy.generate(prompt, Sampling(max_tokens=8), **given)

    async with serving(wanderer(model)) as url, VllmClient(url) as client:
        said = [await answer(client, seed) for seed in range(20)]
        for seed, one in enumerate(said):
            np.testing.assert_array_equal((await answer(twin, seed)).token_ids, one.token_ids)
        with pytest.raises(PolicyRefused, match="paused"):
            await client.load(tmp_path, 3)
        await client.pause("keep")
        await client.load(tmp_path, 3)
        await client.resume()

        assert (await client.info()).version == 3
        assert (await client.info()).tokenizer_digest == renderer.digest
        assert {3} == {span.version for span in (await answer(client, 0)).versions}
    assert len({tuple(one.token_ids) for one in said}) > 1, "a wanderer strays now and then"
