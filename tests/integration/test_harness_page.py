"""The family on the page about harnesses, as somebody would install it, with an agent that uses OpenAI's client."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from infra.clock import SystemClock
from infra.envhost.local import LocalEnvHost
from infra.inference.scripted import ScriptedPolicy
from stages.handlers import registry
from stages.init.stage import InitStage
from stages.run.proxy import Proxy
from stages.run.render import Renderer
from stages.run.stage import RunStage
from tests.foreign_packages import ROOT
from tests.logs import make_task
from tests.model_directory import byte_model
from tests.pools import pool_of
from tests.programs import block_of

PAGE = ROOT / "docs" / "harness.md"
CLOCK = SystemClock()


@pytest.fixture
def family(tmp_path, monkeypatch):
    """The page's family, installed; its agent finds the client where this test has it."""
    information = tmp_path / "my_family-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my_family\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[rollmill.handlers]\nmy_family = my_family:MyFamily\n")
    (tmp_path / "my_family.py").write_text(block_of(PAGE, "my_family.py"))
    found = f"import sys\nsys.path.append({str(Path(openai.__file__).parents[1])!r})\n"
    (tmp_path / "agent.py").write_text(found + block_of(PAGE, "agent.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.handler.cache_clear()
    return registry.handler("my_family")


@pytest.mark.integration
async def test_the_pages_agent_is_rolled_out_and_graded(family, tmp_path):
    """A question, an answer of the policy, a grade for it."""
    renderer = Renderer(byte_model(tmp_path / "model"))
    policy = ScriptedPolicy(lambda prompt, seed: renderer.answer("it is 42").tolist())
    pool = pool_of(CLOCK, policy, wait_s=5.0)
    task = make_task(family="my_family", payload={"question": "six times seven?", "answer": "42"})
    async with (
        LocalEnvHost(registry.environment, clock=CLOCK) as host,
        Proxy(policy=pool, renderer=renderer, clock=CLOCK) as proxy,
    ):
        run = RunStage(hosts=host, policy=pool, renderer=renderer, clock=CLOCK, worker="run-test", proxy=proxy)
        rollout = (await run.handle((await InitStage(host).handle(task)).message)).message

    assert {"exit_code": 0, "output": "it is 42\n"} == rollout.verdict
    assert 1.0 == family.grade(rollout, rollout.verdict).success
    assert "six times seven?" in renderer.display(policy.calls[0].prompt)
