"""Which engines are in a worker's pool: those that are registered on `control`, or the configured one if none is.

They come and go while work is done (`rollmill backends`). Two names of one address are one engine: the first one
counts, by name, since an engine that were counted twice would be given twice its share.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from infra.bus import Bus
from infra.clock import Clock
from infra.control import ControlView
from infra.inference.pool import PolicyPool
from infra.inference.quarantine import refused
from schemas.control import CONFIGURED, Backend

log = logging.getLogger(__name__)

PREFIXES = ("backend/", "quarantine/", "policy/")
"""What the keys begin with that a pool is told of: engines, and which weights may not sample."""


@asynccontextmanager
async def registered(pool: PolicyPool, bus: Bus, clock: Clock, *, url: str) -> AsyncIterator[None]:
    """Keep a pool to what is registered while the block runs, and close it.

    Args:
        pool: what is told.
        bus: the log.
        clock: for limits.
        url: the engine while none is registered.

    Raises:
        WaitTimeout: `control` could not be read to its end.
        BusError: the log is away.
    """

    def take() -> None:
        pool.have(in_pool(view.all(Backend), url))
        pool.refuse(refused(view))

    view = ControlView(bus, clock, told=lambda keys: take() if any(map(_matters, keys)) else None)
    try:
        async with view.following():
            take()
            yield
    finally:
        await pool.close()


def _matters(key: str) -> bool:
    return key.startswith(PREFIXES)


def in_pool(found: Iterable[Backend], url: str) -> list[Backend]:
    """Return the engines of a pool, by name.

    Args:
        found: what is registered.
        url: the engine if that is nothing.
    """
    by_address: dict[str, Backend] = {}
    for backend in sorted(found, key=lambda one: one.name):
        first = by_address.setdefault(backend.url.rstrip("/"), backend)
        if first is not backend:
            log.warning("backend %s is at the address of %s, and left out", backend.name, first.name)
    return list(by_address.values()) or [Backend(name=CONFIGURED, url=url)]
