"""A cancel on a real Kafka: queued and running samples end, their environments close, another run goes on."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import asynccontextmanager

import pytest

from infra.cancellation import Cancellation
from infra.clock import SystemClock
from infra.config import BusConfig, Config, StageConfig
from infra.connect import connected
from infra.envhost.local import LocalEnvHost
from infra.inference.scripted import ScriptedPolicy
from infra.wire import Publisher
from producers.publish import ensure_manifest, publish_tasks, tasks_of
from producers.reaper import Reaper
from producers.source import Instance
from rollmill.commands.cancel import withdraw
from rollmill.covered import Covered
from schemas.control import RunManifest
from schemas.topics import TABLE
from stages.handlers.registry import environment
from stages.pipeline import Outside, Pipeline
from stages.run.render import Renderer
from tests import toys
from tests.logs import wait_until
from tests.model_directory import word_model

pytestmark = pytest.mark.integration

LIMIT_S = 90.0
CLOCK = SystemClock()
CONFIG = Config(run=StageConfig(max_in_flight=8, drain_s=0))
"""RUN takes eight at once: the others wait in `episodes`."""


class HeldPolicy(ScriptedPolicy):
    """An engine that holds every generation until the gate is open."""

    def __init__(self, renderer):
        super().__init__(lambda *_: renderer.answer("hello").tolist(), tokenizer_digest=renderer.digest)
        self.gate = asyncio.Event()
        self.held = 0

    async def generate(self, *arguments, **settings):
        self.held += 1
        try:
            await self.gate.wait()
        finally:
            self.held -= 1
        return await super().generate(*arguments, **settings)


@asynccontextmanager
async def running(*services):
    """Run services while the block runs; one that ends by itself would be an error."""
    tasks = [asyncio.create_task(service.run()) for service in services]
    try:
        yield
        assert not any(task.done() for task in tasks), tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def publish(bus, run, groups):
    publisher = Publisher(bus, CLOCK, "test")
    manifest = await ensure_manifest(bus, CLOCK, publisher, RunManifest(run=run, seed=1, samples=2))
    for row in range(groups):
        toy = Instance(visit=0, row=row, family="toy", payload={"length": 2})
        await publish_tasks(publisher, tasks_of(manifest, "toys", toy, now_ms=CLOCK.now_ms()))


async def test_a_cancelled_run_ends_and_another_goes_on(kafka, tmp_path, monkeypatch):
    """Eight episodes run and twelve wait: all get one outcome by the cancel, and the host holds none of theirs."""
    toys.install(tmp_path / "site", monkeypatch)
    renderer = Renderer(word_model(tmp_path / "model", toys.WORDS))
    settings = BusConfig(bootstrap=kafka, prefix=f"cancel-{secrets.token_hex(3)}.")
    async with connected(settings, client="test", check=False) as bus:
        await bus.create_topics(TABLE)
        cancellation, policy = Cancellation(bus, CLOCK), HeldPolicy(renderer)
        host = LocalEnvHost(
            environment, withdrawn=lambda key: bool(cancellation.cancels.of(key.run, key.group, key.sample))
        )
        cancellation.tell(host.host.sweep)
        pipeline = Pipeline(bus, CLOCK, CONFIG, Outside(host=host, policy=policy, renderer=renderer))
        async with host, cancellation.following_on(), running(pipeline, Reaper(bus, CLOCK)):
            await publish(bus, "mine", 10)
            await wait_until(lambda: policy.held, 8, limit_s=LIMIT_S)
            result = await withdraw(bus, CLOCK, "mine", "by request", force=False, wait_s=LIMIT_S)
            await wait_until(lambda: -policy.held, 0, limit_s=LIMIT_S)
            await wait_until(lambda: -host.host.counts().environments, 0, limit_s=LIMIT_S)
            policy.gate.set()
            await publish(bus, "other", 2)
            others = Covered(bus, CLOCK, "other")
            await others.read()
            await others.all_ended(LIMIT_S)

    assert {"cancelled": 20} == result["outcomes"]
    assert {"completed": 4} == others.outcomes
