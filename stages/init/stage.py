"""Task -> Episode: an environment is created and reset on a host, and the conversation is opened.

The lease stays in its short `created` state until the Episode is acknowledged, so an environment whose Episode never
reached the log disappears by itself; a redelivered task gets the same environment again. Waiting for a place on a
full host, or for a host that is away, raises no attempt: it is bounded by the stage's budget.
"""

from __future__ import annotations

import asyncio

from infra.envhost.client import EnvHostClient
from infra.envhost.protocol import Closed, Create
from infra.errors import Failure, boundary
from infra.middleware.deadline import reap_at_ms
from infra.stage import Done
from schemas.messages import Episode, Task
from schemas.outcome import Boundary, FailureKind
from schemas.task_flaws import flaw
from stages.handlers.registry import handler


class InitStage:
    """Opens episodes on one environment host."""

    def __init__(self, host: EnvHostClient, *, outage_s: float = 0.0) -> None:
        """Build the stage.

        Args:
            host: where environments are created.
            outage_s: environments are kept this much longer than their samples may take, seconds, since the reaper
                gives a sample more time when a service was away, and cannot tell the host.
        """
        self._host = host
        self._outage_ms = int(outage_s * 1000)

    async def handle(self, task: Task) -> Done[Episode] | None:
        """Open an episode; None when a rollout of this very attempt is in the log already. Raises Failure."""
        wrong = await asyncio.to_thread(flaw, task)
        if wrong is not None:
            raise Failure(FailureKind.INVALID_TASK, Boundary.TASK, wrong)
        family = handler(task.family)
        request = Create.of(task, reap_at_ms=reap_at_ms(task) + self._outage_ms, wait_s=task.budgets.init_s)
        created = await self._host.create(request)
        if isinstance(created, Closed):
            return None
        with boundary(Boundary.HANDLER_INIT, FailureKind.HANDLER):
            opening = await asyncio.to_thread(family.init, task, created.observation)
        episode = Episode(
            task=task,
            host=self._host.address,
            lease=created.lease,
            messages=opening.messages,
            tools=opening.tools,
            prompt_version=family.prompt_version,
        )

        async def ready() -> None:
            await self._host.ready(created.lease)

        return Done(episode, ready)
