"""Keeps a claim alive while its worker does something else, such as waiting for the policy.

A claim that turns out to be another's or lost ends the work under it at once: what it would still sample could never
be published. A host that does not answer does not: the next step will tell.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.clock import Clock
from infra.envhost.client import EnvHostClient
from infra.envhost.lease import Fenced
from infra.errors import Failure
from infra.side_by_side import alongside
from schemas.outcome import FailureKind

log = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""A claim is renewed this often, seconds: three may be missed before the host's 60 s are over."""


@asynccontextmanager
async def heartbeat(
    client: EnvHostClient, lease: str, token: int, *, clock: Clock, every_s: float = HEARTBEAT_S
) -> AsyncIterator[None]:
    """Renew a claim until the block is left.

    Raises:
        Fenced: another worker claimed the lease; the block was cancelled.
        Failure: the lease is lost; the block was cancelled.
    """
    async with alongside(_beat(client, lease, token, clock, every_s)):
        yield


async def _beat(client: EnvHostClient, lease: str, token: int, clock: Clock, every_s: float) -> None:
    while True:
        await clock.sleep(every_s)
        try:
            await client.renew(lease, token)
        except Fenced:
            raise
        except Failure as failure:
            if failure.kind is FailureKind.ENVIRONMENT_LOST:
                raise
            log.warning("heartbeat of lease %s: %s", lease, failure)
