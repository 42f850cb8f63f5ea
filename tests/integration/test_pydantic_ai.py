"""An agent of a library that nobody wrote for us, rolled out as it is: it knows a `base_url` and a key."""

from __future__ import annotations

import json
import sys

import pytest

from infra.clock import SystemClock
from infra.envhost.local import LocalEnvHost
from infra.inference.scripted import ScriptedPolicy
from schemas import transcript
from schemas.outcome import StopReason
from stages.handlers.registry import environment
from stages.init.stage import InitStage
from stages.run.proxy import Proxy
from stages.run.render import Renderer
from stages.run.stage import RunStage
from tests import toys
from tests.chat_templates import QWEN_2
from tests.foreign_packages import ROOT, install
from tests.logs import make_task
from tests.model_directory import family_model
from tests.pools import pool_of

PYDANTIC_AI = (
    *("pydantic-ai-slim==2.68.0", "pydantic-graph==2.68.0", "openai==3.57.0", "jiter==0.19.0", "sniffio==1.3.1"),
    *("genai-prices==0.2.3", "griffelib==2.4.1", "logfire-api==5.6.0", "opentelemetry-api==1.45.2"),
    *("tiktoken==0.14.0", "requests==2.34.2", "charset-normalizer==3.5.3"),
)
"""Pydantic AI and what it needs beside ours."""

LOOK = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"where": "north"}}\n</tool_call>'


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Return a folder with Pydantic AI: beside our packages, never among them."""
    return install(tmp_path_factory.mktemp("pydantic_ai"), *PYDANTIC_AI, alone=True)


def answering(renderer):
    """Return a policy that looks, tells what there is, and then its colour."""

    def script(prompt, seed):
        seen = renderer.display(prompt)
        said = "it is red" if "colour" in seen else "there is a door" if "a door" in seen else LOOK
        return renderer.answer(said).tolist()

    return ScriptedPolicy(script)


@pytest.mark.slow
@pytest.mark.integration
async def test_an_agent_of_pydantic_ai_is_rolled_out_as_it_is(packages, tmp_path, monkeypatch):
    """It calls a tool and talks on, whole and streamed: one segment, a turn for each of its calls."""
    toys.install(tmp_path / "site", monkeypatch)
    renderer, clock = Renderer(family_model(tmp_path / "model", QWEN_2, context=8192)), SystemClock()
    pool = pool_of(clock, answering(renderer), wait_s=5.0)
    program = [sys.executable, str(ROOT / "tests/integration/pydantic_ai_side.py"), str(packages)]
    task = make_task(family="program_toy", payload={"command": program})
    async with (
        LocalEnvHost(environment, clock=clock) as host,
        Proxy(policy=pool, renderer=renderer, clock=clock) as proxy,
    ):
        run = RunStage(hosts=host, policy=pool, renderer=renderer, clock=clock, worker="run-test", proxy=proxy)
        rollout = (await run.handle((await InitStage(host).handle(task)).message)).message

    said = {"looked": ["north"], "said": "there is a door", "streamed": "it is red"}
    assert (0, said) == (rollout.verdict["exit_code"], json.loads(rollout.verdict["output"].splitlines()[-1]))
    assert StopReason.DONE is rollout.stop
    record = rollout.transcript
    transcript.check(record)
    assert ((0,), ["look", "message", "message"]) == (record.segments, [turn.action for turn in record.turns])
    assert [LOOK, "there is a door", "it is red"] == [
        renderer.text(record.token_ids[turn.sampled : turn.stop]) for turn in record.turns
    ]
