"""An environment host that INIT and RUN can wait for: one that is away is asked again, bounded.

Only what may be repeated is repeated here: a create gives the same lease again, a claim fences the one whose answer was
lost, a renewal says nothing new. A step or a verdict that nobody answered may have been carried out: it raises
`HostAway`, and whoever drives the episode may claim the environment anew, which puts it back to its start. While the
guard is open the host is not called, and the time does not count (`infra/guard.py`); but a host that is away while
another one is there is not waited for at all: INIT finds the other one. This file does not know leases or HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from infra.clock import Clock
from infra.envhost.client import EnvHostClient, EnvHosts, HostAway
from infra.envhost.environment import StepResult
from infra.envhost.lease import Fenced
from infra.envhost.protocol import Claimed, Closed, Counts, Create, Created
from infra.errors import Failure
from infra.guard import Guard, Guards
from infra.waiting import waits_for

log = logging.getLogger(__name__)

T = TypeVar("T")

ENVHOST = "envhost"
"""Name of the service."""

WAIT_S = 120.0
"""Longest wait for a host that is away, seconds, not counting what the guard was open."""

AGAIN_S = 0.5
"""Pause before a host that is away is called again, seconds."""


class PatientHost:
    """One environment host, called again while it is away."""

    def __init__(
        self,
        client: EnvHostClient,
        clock: Clock,
        guard: Guard,
        *,
        wait_s: float = WAIT_S,
        replaceable: Callable[[], bool] = lambda: False,
    ) -> None:
        """Build it.

        Args:
            client: the host.
            clock: for pauses.
            guard: stands before the host.
            wait_s: longest wait of a call but `create`, which has its own.
            replaceable: tells whether another host is there.
        """
        self._client = client
        self._clock = clock
        self._guard = guard
        self._wait_s = wait_s
        self._replaceable = replaceable

    @property
    def address(self) -> str:
        """Where the host is."""
        return self._client.address

    async def create(self, request: Create) -> Created | Closed:
        """Build and reset an environment; waits for a free place and for a host that is away."""
        until = self._guard.counted_s + request.wait_s

        async def ask() -> Created | Closed:
            left_s = max(0.0, until - self._guard.counted_s)
            return await self._client.create(msgspec.structs.replace(request, wait_s=left_s))

        return await self._patiently("create", ask, request.wait_s)

    async def renew(self, lease: str, token: int | None = None) -> None:
        """Postpone the end of a lease."""
        await self._patiently("renew", lambda: self._client.renew(lease, token), self._wait_s)

    async def ready(self, lease: str) -> bool:
        """Say that the Episode is in the log."""
        return await self._client.ready(lease)

    async def claim(self, lease: str) -> Claimed | Closed:
        """Take the environment over, at its start."""
        return await self._patiently("claim", lambda: self._client.claim(lease), self._wait_s)

    async def step(self, lease: str, token: int, action: Mapping[str, Any]) -> StepResult:
        """Carry out one action."""
        return await self._noted(self._client.step(lease, token, action))

    async def verdict(self, lease: str, token: int) -> dict[str, Any]:
        """Return the environment's final state."""
        return await self._noted(self._client.verdict(lease, token))

    async def close(self, lease: str, token: int) -> bool:
        """Say that an output of this claim is in the log."""
        return await self._client.close(lease, token)

    async def withdraw(self, lease: str) -> bool:
        """Say that the sample was cancelled and has its terminal record."""
        return await self._client.withdraw(lease)

    async def counts(self) -> Counts:
        """Say how the host is."""
        return await self._client.counts()

    async def disconnect(self) -> None:
        """Give up connections."""
        await self._client.disconnect()

    async def _patiently(self, what: str, ask: Callable[[], Awaitable[T]], wait_s: float) -> T:
        until, waited = self._guard.counted_s + wait_s, False
        while True:
            while self._guard.open:
                if self._replaceable():
                    raise HostAway(f"{what}: the environment host at {self.address} is away, another one is there")
                waited = True
                waits_for(f"the environment host at {self.address}, which is away")
                await self._clock.sleep(AGAIN_S)
            try:
                answer = await self._noted(ask())
            except HostAway as away:
                if self._guard.counted_s + AGAIN_S > until:
                    raise HostAway(f"waited {wait_s:g} s for {what}: {away.cause}") from away
                log.debug("%s is called again: %s", what, away)
                await self._clock.sleep(AGAIN_S)
            else:
                if waited:
                    waits_for("")
                return answer

    async def _noted(self, call: Awaitable[T]) -> T:
        """Await a call and tell the guard what it says about the host."""
        try:
            answer = await call
        except HostAway as away:
            self._guard.failed(away.cause)
            raise
        except (Failure, Fenced):
            self._guard.succeeded()  # somebody has answered
            raise
        self._guard.succeeded()
        return answer


class PatientHosts:
    """Patient clients by address, each behind its guard."""

    def __init__(self, hosts: EnvHosts, clock: Clock, guards: Guards) -> None:
        """Build it.

        Args:
            hosts: the clients.
            clock: for pauses.
            guards: the worker's.
        """
        self._hosts = hosts
        self._clock = clock
        self._guards = guards
        self._patient: dict[str, PatientHost] = {}

    def at(self, address: str) -> PatientHost:
        """Return the client of the host at an address."""
        if address not in self._patient:
            self._patient[address] = self._made(self._hosts.at(address))
        return self._patient[address]

    async def disconnect(self) -> None:
        """Give up all connections."""
        await self._hosts.disconnect()

    def _made(self, client: EnvHostClient) -> PatientHost:
        guard = self._guards.guard(ENVHOST, client.address, lambda: answers(client))
        return PatientHost(client, self._clock, guard, replaceable=lambda: self._guards.replaceable(guard))


async def answers(client: EnvHostClient) -> bool:
    """Tell whether the host is there: the probe of its guard."""
    try:
        await client.counts()
    except HostAway:
        return False
    return True
