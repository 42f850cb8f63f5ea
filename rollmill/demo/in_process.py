"""All services as tasks on one event loop, on the in-memory log: the same code, nothing durable.

There is no ClickHouse and no process here: samples are placed by `rollmill/ledger.py`, and nothing can be killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from infra.bus import Bus
from infra.clock import Clock, SystemClock
from infra.config import Config
from infra.control import ControlView
from infra.envhost.local import LocalEnvHost
from infra.inference.base import NumberFormat
from infra.inference.local_server.app import serving
from infra.inference.local_server.engine import EngineLimits
from infra.inference.sync import WeightSync
from infra.inference.vllm import VllmClient
from infra.memory import MemoryBus
from infra.wire import Publisher
from producers.feeder import Feeder
from producers.reaper import Reaper
from producers.sources import describe, make_source
from rollmill.commands.train import manifest_and_digests, write_manifest
from rollmill.demo.machine import Conservation, put_weights
from rollmill.evaluator import evaluator_of
from rollmill.ledger import ledger
from schemas.topics import TABLE
from stages.handlers.registry import environment
from stages.pipeline import Outside, Pipeline
from stages.run.render import Renderer
from trainer.config import load_config
from trainer.loop import run as run_trainer


class MemoryMachine:
    """Everything in this process: same code, nothing durable."""

    name = "memory"
    keeps_tables = False

    def __init__(
        self,
        model: Path,
        *,
        limits: EngineLimits | None = None,
        threads: int = 1,
        dtype: NumberFormat = "float32",
    ) -> None:
        """Plan the parts.

        Args:
            model: directory of the model that the policy starts with.
            limits: how much its engine takes on.
            threads: torch threads of the engine.
            dtype: number format of the engine's weights.
        """
        self.clock: Clock = SystemClock()
        self.bus: Bus = MemoryBus()
        self._model = model
        self._limits = limits
        self._threads = threads
        self._dtype: NumberFormat = dtype
        self._open = AsyncExitStack()
        self._tasks: list[asyncio.Task[object]] = []
        self._client: VllmClient | None = None

    async def __aenter__(self) -> Self:
        """Start everything but training."""
        await self.bus.start()
        await self.bus.create_topics(TABLE)
        served = serving(self._model, limits=self._limits, threads=self._threads, dtype=self._dtype)
        url = await self._open.enter_async_context(served)
        self._client = await self._open.enter_async_context(VllmClient(url))
        host = await self._open.enter_async_context(LocalEnvHost(environment))
        config = Config()
        outside = Outside(host=host, policy=self._client, renderer=Renderer(self._model))
        self._spawn(Pipeline(self.bus, self.clock, config, outside).run())
        self._spawn(Reaper(self.bus, self.clock).run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._open.__aexit__(kind, error, trace)
        await self.bus.close()

    async def load(self, directory: Path) -> None:
        """Put weights into the policy."""
        assert self._client is not None, "enter the machine first"
        await put_weights(self._client, directory)

    async def train(self, run_toml: Path) -> None:
        """Start feeder, trainer and the hand-over of weights."""
        assert self._client is not None, "enter the machine first"
        run = load_config(run_toml)
        # Feeder and trainer begin side by side, and the feeder wants it.
        start = await write_manifest(manifest_and_digests(run), self.bus, self.clock)
        run = run.model_copy(update={"start": start})
        control = ControlView(self.bus, self.clock)
        await control.start()
        self._spawn(control.follow())
        publisher = Publisher(self.bus, self.clock, "policy")
        self._spawn(WeightSync(control, self._client, self.clock, publisher, run=run.run).run())
        source = make_source(describe(dict(run.tasks)), run_toml.parent)
        self._spawn(Feeder(self.bus, self.clock, run.run, source).run())
        evaluator = evaluator_of(self.bus, self.clock, run, run_toml.parent)
        self._spawn(run_trainer(run, self.bus, self.clock, resume=True, evaluator=evaluator))

    async def kill(self, service: str) -> float | None:
        """There is no process to kill."""
        return None

    async def watch(self) -> None:
        """Return never; raises what a service raised."""
        waiting = {task for task in self._tasks if not task.done()}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await asyncio.Event().wait()  # all services ended in good order: nothing to report

    async def conservation(self, run: str) -> Conservation:
        """Place the samples of a run by the rules in `schemas`, straight from the log."""
        found = await ledger(self.bus, self.clock, run)
        return Conservation(
            conserved=bool(found.places) and not found.violations,
            admitted=len(found.places),
            counts=found.counts(),
            violations=tuple(found.violations),
        )

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        self._tasks.append(asyncio.create_task(work))
