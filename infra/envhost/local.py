"""The environment host in the same process: the same leases and rules, no socket.

For the one-process pipeline and for tests; what it promises is what `client.EnvHostClient` promises, and the same
contract test holds it to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from infra.clock import Clock
from infra.envhost.environment import EnvironmentFactory, StepResult
from infra.envhost.host import EnvHost, HostLimits, nobody
from infra.envhost.lease import Fenced, LeaseKey
from infra.envhost.protocol import Claimed, Closed, Counts, Create, Created, HostFull
from infra.errors import ConfigError, Failure
from schemas.outcome import Boundary, FailureKind

log = logging.getLogger(__name__)

LOCAL = "local:"
"""Address of the host in this process."""


class LocalEnvHost:
    """A host and its client in one; enter it to have leases reaped and environments closed at the end.

    Args:
        factory: builds environments.
        clock: for leases and waits.
        limits: what the host takes on; a create may wait as long as its request says.
        withdrawn: tells whether a sample was cancelled.
        threads: where environments are called; by default a pool of its own.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        *,
        clock: Clock | None = None,
        limits: HostLimits | None = None,
        withdrawn: Callable[[LeaseKey], bool] = nobody,
        threads: ThreadPoolExecutor | None = None,
    ) -> None:
        self.host = EnvHost(factory, clock=clock, limits=limits, withdrawn=withdrawn, threads=threads)
        self._reaper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to reap."""
        self._reaper = asyncio.create_task(self.host.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all environments."""
        if self._reaper:
            self._reaper.cancel()
        await self.host.stop()

    def at(self, address: str) -> Self:
        """Return this host: there is no other.

        Raises:
            ConfigError: an Episode names another host.
        """
        if address != LOCAL:
            raise ConfigError(
                f"this process holds its own environments ({LOCAL}); {address!r} cannot be reached from it"
            )
        return self

    @property
    def address(self) -> str:
        """Where the host is: here."""
        return LOCAL

    async def create(self, request: Create) -> Created | Closed:
        """Build and reset an environment."""
        try:
            return await self.host.create(request)
        except HostFull as error:
            cause = f"no environment within {request.wait_s:g} s: {error}"
            raise Failure(FailureKind.INFRASTRUCTURE, Boundary.ENVIRONMENT, cause) from error

    async def renew(self, lease: str, token: int | None = None) -> None:
        """Postpone the end of a lease."""
        await self.host.renew(lease, token)

    async def ready(self, lease: str) -> bool:
        """Say that the Episode is in the log."""
        try:
            await self.host.ready(lease)
        except Failure as failure:
            log.info("ready was of no effect: %s", failure)
            return False
        return True

    async def claim(self, lease: str) -> Claimed | Closed:
        """Take the environment over, at its start."""
        return await self.host.claim(lease)

    async def step(self, lease: str, token: int, action: Mapping[str, Any]) -> StepResult:
        """Carry out one action."""
        stepped = await self.host.step(lease, token, action)
        return StepResult(stepped.observation, stepped.done)

    async def verdict(self, lease: str, token: int) -> dict[str, Any]:
        """Return the environment's final state."""
        return await self.host.verdict(lease, token)

    async def close(self, lease: str, token: int) -> bool:
        """Say that an output of this claim is in the log."""
        try:
            await self.host.close(lease, token)
        except (Failure, Fenced) as error:
            log.info("close was of no effect: %s", error)
            return False
        return True

    async def withdraw(self, lease: str) -> bool:
        """Say that the sample was cancelled and has its terminal record."""
        try:
            await self.host.withdraw(lease)
        except Failure as failure:
            log.info("withdraw was of no effect: %s", failure)
            return False
        return True

    async def counts(self) -> Counts:
        """Say how the host is."""
        return self.host.counts()

    async def disconnect(self) -> None:
        """Nothing to give up: the host is here."""
