"""The whole path in one process: three stages between four topics, on any bus.

    TASKS -init-> EPISODES -run-> ROLLOUTS -eval-> TRAJECTORIES

The same stages run as separate processes (`python -m stages.init`, `.run`, `.eval`), any number of each; here they
share an event loop, which is what tests and `rollmill demo --bus memory` use.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from infra.bus import Bus
from infra.clock import Clock
from infra.config import Config
from infra.envhost.local import LocalEnvHost
from infra.envhost.patient import PatientHosts
from infra.guard import Guards
from infra.inference.backends import in_pool
from infra.inference.base import PolicyClient
from infra.inference.pool import PolicyPool
from infra.stage import Member
from infra.wire import Publisher
from stages.eval.stage import grade
from stages.init.stage import InitStage
from stages.run.proxy import Proxy
from stages.run.render import Renderer
from stages.run.stage import RunStage
from stages.wiring import eval_stage, init_stage, run_stage


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What the stages reach outside the log."""

    host: LocalEnvHost
    """The environment host."""
    policy: PolicyClient
    """The engine."""
    renderer: Renderer
    """Tokenizer and template of the engine's model."""


class Pipeline:
    """All three stages on one event loop."""

    def __init__(self, bus: Bus, clock: Clock, config: Config, outside: Outside, *, worker: str = "pipeline") -> None:
        limits, publisher = config.breaker.limits(), Publisher(bus, clock, worker)
        for_init = Guards(publisher, clock, stage="init", worker=worker, limits=limits)
        for_run = Guards(publisher, clock, stage="run", worker=worker, limits=limits)
        init = InitStage(
            PatientHosts(outside.host, clock, for_init).at(outside.host.address), outage_s=config.breaker.longest_s
        )
        pool = PolicyPool(
            lambda _: outside.policy,
            clock,
            for_run,
            wait_s=config.policy.wait_s,
            tokenizer_digest=outside.renderer.digest,
        )
        pool.have(in_pool([], config.policy.url))
        self._proxy = Proxy(
            policy=pool, renderer=outside.renderer, clock=clock, config=config.proxy, model=config.policy.name
        )
        run = RunStage(
            hosts=PatientHosts(outside.host, clock, for_run),
            policy=pool,
            renderer=outside.renderer,
            clock=clock,
            worker=worker,
            proxy=self._proxy,
        )
        self._members = [
            Member(
                init_stage(init.handle),
                bus,
                clock,
                worker=worker,
                limits=config.init.limits(),
                tells=config.init.events,
                first=True,
                outages=for_init,
            ),
            Member(
                run_stage(run.handle, run.withdraw),
                bus,
                clock,
                worker=worker,
                limits=config.run.limits(),
                tells=config.run.events,
                outages=for_run,
            ),
            Member(
                eval_stage(grade),
                bus,
                clock,
                worker=worker,
                limits=config.eval.limits(),
                tells=config.eval.events,
            ),
        ]

    def stop(self) -> None:
        """Ask all stages to finish what they can and leave."""
        for member in self._members:
            member.stop()

    async def run(self) -> None:
        """Work until stopped; one stage that breaks stops the others."""
        async with self._proxy, asyncio.TaskGroup() as group:
            for member in self._members:
                group.create_task(member.run())
