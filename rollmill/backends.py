"""The engines that are registered on `control`: what is said of them, and changed.

Every change is one record of the engine's key; RUN workers and whoever brings weights follow it within a second.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from infra.bus import Bus
from infra.clock import Clock
from infra.control import control_now
from infra.errors import ConfigError
from infra.inference.backends import in_pool
from infra.inference.base import Connect, PolicyClient, PolicyError
from infra.inference.pooled import flaw_of, named, served_by
from infra.wire import Publisher
from schemas.control import CONFIGURED, Backend, control_key
from schemas.topics import CONTROL


async def listed(bus: Bus, clock: Clock, connect: Connect, *, url: str) -> list[dict[str, Any]]:
    """Return what there is to say of each engine of the pool; each is asked.

    Args:
        bus: the log, connected.
        clock: for limits.
        connect: makes the client of an engine.
        url: the engine while none is registered.
    """
    found = in_pool((await control_now(bus, clock)).all(Backend), url)
    return await asyncio.gather(*(_told(backend, connect(backend.url)) for backend in found))


async def _told(backend: Backend, client: PolicyClient) -> dict[str, Any]:
    said: dict[str, Any] = {**msgspec.structs.asdict(backend), "registered": backend.name != CONFIGURED}
    try:
        info = await served_by(client)
    except PolicyError as error:
        return {**said, "state": "away", "cause": str(error)}
    finally:
        await client.close()
    flaw = flaw_of(info)
    state = "unfit" if flaw else "drained" if backend.draining else "serves"
    return {
        **said,
        "state": state,
        "cause": flaw,
        "model": info.model,
        "version": info.version,
        "weights_of": info.run,
        "serves": named(info.weights),
        "tokenizer": info.tokenizer_digest,
        "context": info.max_model_len,
        "dtype": info.dtype,
    }


async def added(bus: Bus, clock: Clock, backend: Backend, connect: Connect | None) -> dict[str, Any]:
    """Register an engine, or change one, and return what it serves.

    Args:
        bus: the log, connected.
        clock: for limits.
        backend: the engine.
        connect: makes the client that asks it first; none registers it unasked.

    Raises:
        ConfigError: it cannot be registered so, does not answer, or no answer of it could be trained on.
    """
    try:
        backend.check()
    except ValueError as error:
        raise ConfigError(f"backend {backend.name}: {error}") from error
    others = (await control_now(bus, clock)).all(Backend)
    if same := [one.name for one in others if one.url == backend.url and one.name != backend.name]:
        raise ConfigError(f"{backend.url} is registered as {same[0]} already: an engine has one name")
    said: dict[str, Any] = {"name": backend.name, "url": backend.url, "state": "not asked"}
    if connect is not None:
        said = await _told(backend, connect(backend.url))
        if said["state"] in {"away", "unfit"}:
            raise ConfigError(f"{backend.url} cannot be used: {said['cause']}. --force registers it all the same")
    await Publisher(bus, clock, "backends").publish(CONTROL, backend)
    return said


async def drained(bus: Bus, clock: Clock, name: str) -> dict[str, Any]:
    """Give an engine nothing new. Raises ConfigError if none is registered under that name."""
    backend = await _registered(bus, clock, name)
    await Publisher(bus, clock, "backends").publish(CONTROL, msgspec.structs.replace(backend, draining=True))
    return {"name": name, "url": backend.url, "state": "drained"}


async def removed(bus: Bus, clock: Clock, name: str) -> dict[str, Any]:
    """Remove an engine's record. Raises ConfigError if none is registered under that name."""
    backend = await _registered(bus, clock, name)
    await bus.publish(CONTROL.name, None, key=control_key(backend).encode(), partition=0)
    return {"name": name, "url": backend.url, "state": "removed"}


async def _registered(bus: Bus, clock: Clock, name: str) -> Backend:
    control = await control_now(bus, clock)
    backend = control.get(f"backend/{name}", Backend)
    if backend is None:
        known = ", ".join(one.name for one in control.all(Backend)) or "none"
        raise ConfigError(f"no backend is registered as {name!r}; registered: {known}")
    return backend
