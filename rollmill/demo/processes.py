"""One process per service, on a real Kafka: what `rollmill up` runs, and training beside it.

What is killed is restarted by the supervisor as in any local system; nothing here helps it to recover.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from infra import broker
from infra.bus import Bus
from infra.clickhouse.check import check
from infra.clock import Clock, SystemClock
from infra.config import Config
from infra.connect import connected
from infra.inference.vllm import VllmClient
from rollmill import store
from rollmill.demo.machine import Conservation, put_weights
from rollmill.services import MODEL_LIMIT_S, LocalPlan, local_services, make_plan, rollmill, without
from rollmill.supervisor import Event, Restart, Service, Supervisor
from rollmill.supervisor.readiness import at_once, says

SESSION_TIMEOUT_S = 6.0
"""A killed worker's partitions move after this long, seconds."""

TOOK_OVER = r": epoch \d+, step \d+"
"""What the trainer logs once it has taken the run over."""

MOST_DEATHS = 5
"""A trainer or feeder that dies this often in a row will not recover by itself."""


class ProcessMachine:
    """One process per service, on a real Kafka."""

    name = "kafka"
    keeps_tables = True
    bus: Bus

    def __init__(
        self,
        folder: Path,
        model: Path,
        run_toml: Path,
        run: str,
        *,
        bootstrap: str | None,
        say: Callable[[Event], None],
    ) -> None:
        """Plan the services.

        Args:
            folder: everything is kept here.
            model: directory of the model that the policy starts with.
            run_toml: the run that will be trained.
            run: its name.
            bootstrap: a Kafka that runs elsewhere; one is started here without it.
            say: told what happens to the services.
        """
        self.clock: Clock = SystemClock()
        bus = Config().bus.model_copy(update={"session_timeout_s": SESSION_TIMEOUT_S})
        base = Config().model_copy(update={"bus": bus})
        self._plan = make_plan(folder, base=base, model=model, bootstrap=bootstrap)
        self._own_broker = bootstrap is None
        # Without the live board: the demo watches its run itself, and two cores have enough to do.
        base_services = without(local_services(self._plan), {"board"})
        self._base = tuple(service.name for service in base_services)
        services = training_services(self._plan, run_toml, run)
        self._supervisor = Supervisor(
            (*base_services, *services), run_dir=self._plan.run_dir, addresses=self._plan.addresses, on_event=say
        )
        self._run = run
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start everything but training."""
        if self._own_broker:
            await asyncio.to_thread(broker.prepare)
        try:
            await self._open.enter_async_context(self._supervisor)
            self._plan.write()
            await self._supervisor.start(*self._base)
            self.bus = await self._open.enter_async_context(connected(self._plan.config.bus, client="demo"))
        except BaseException:
            await self._open.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        await self._open.__aexit__(kind, error, trace)

    async def load(self, directory: Path) -> None:
        """Put weights into the policy."""
        async with VllmClient(self._plan.config.policy.url, model=self._plan.config.policy.name) as client:
            await put_weights(client, directory)

    async def train(self, run_toml: Path) -> None:
        """Start feeder, trainer and the hand-over of weights."""
        await self._supervisor.start("follow", "feeder", "trainer")

    async def kill(self, service: str) -> float | None:
        """Kill -9 one process and return the seconds until it was back."""
        pid = self._supervisor.kill(service)
        return await self._supervisor.recovered(service, since=pid)

    async def watch(self) -> None:
        """Return never; raises when a service fails for good."""
        await self._supervisor.wait()
        await asyncio.Event().wait()  # all services ended in good order: nothing to report

    async def conservation(self, run: str) -> Conservation:
        """Ask ClickHouse where the samples of a run went."""
        report = await check(self.bus, store.address(self._plan.config), self.clock, run)
        return Conservation(
            conserved=report.conserved,
            admitted=report.admitted,
            counts=report.counts,
            violations=report.violations,
        )


def training_services(plan: LocalPlan, run_toml: Path, run: str) -> tuple[Service, ...]:
    """Return what trains a run beside the services of `rollmill up`: trainer, feeder and the hand-over of weights."""
    config = ("--config", str(plan.config_path))
    once = Restart.ON_FAILURE
    return (
        Service(name="follow", argv=rollmill("policy", "follow", run, *config), after=("policy",), ready=at_once()),
        Service(
            name="feeder",
            argv=rollmill("feeder", str(run_toml), *config),
            after=("topics",),
            ready=at_once(),
            restart=once,
            give_up_after=MOST_DEATHS,
        ),
        Service(
            name="trainer",
            argv=rollmill("train", str(run_toml), "--resume", *config),
            after=("topics",),
            ready=says(TOOK_OVER, limit_s=MODEL_LIMIT_S),
            restart=once,
            give_up_after=MOST_DEATHS,
        ),
    )
