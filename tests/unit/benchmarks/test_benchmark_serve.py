"""The server and its rivals are given the same work."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import serve
from infra.inference.scripted import ScriptedPolicy
from stages.handlers.keydoor import WORDS
from trainer.models import create_wordlevel_model


@pytest.fixture
def sides(tmp_path):
    create_wordlevel_model(tmp_path, seed=0, words=WORDS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    client = ScriptedPolicy(lambda prompt, seed: [1] * serve.BATCH_ANSWER)
    return serve.Sides(client, model, model.config.vocab_size, quick=True)


async def test_an_episodes_prompts_hold_all_tokens_before_them(sides, monkeypatch):
    """On both sides, with as many turns and tokens."""
    asked = []
    generated = sides._generated
    monkeypatch.setattr(
        sides, "_generated", lambda prompts, tokens: asked.append(prompts[0].tolist()) or generated(prompts, tokens)
    )
    assert await sides.ours(0) > 0
    assert await sides.alone(0) > 0

    lengths = [serve.OPENING + turn * (serve.ANSWER + serve.OBSERVATION) for turn in range(serve.TURNS)]
    theirs = [len(prompt) for prompt in asked[: serve.TURNS]]
    ours = [len(call.prompt) for call in sides.client.calls if call.request_id.startswith("0/0/")]
    assert (ours, theirs) == (lengths, lengths)
    assert len(asked) == serve.ALONE[True] * serve.TURNS
    assert len(sides.client.calls) == serve.EPISODES * serve.TURNS


async def test_the_batch_is_the_same_prompts(sides, monkeypatch):
    """Of equal length, all of them at once."""
    batches = []
    monkeypatch.setattr(sides, "_generated", lambda prompts, tokens: batches.append((prompts.tolist(), tokens)))
    await sides.batched(3)
    await sides.ours_equal(3)

    assert batches == [([call.prompt.tolist() for call in sides.client.calls], serve.BATCH_ANSWER)]
