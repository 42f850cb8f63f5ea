"""The registered engines over HTTP, for whoever starts engines and has no command line: `rollmill backends serve`.

    GET    /backends                what there is, and what each serves
    PUT    /backends/NAME           {"url": ..., "weight": 1.0, "run": "", "force": false}: register, or change
    PUT    /backends/NAME/drain     give it nothing new
    DELETE /backends/NAME           forget it

It does what the commands do (`backends.py`) and holds nothing itself: two of it are one. Errors are
`{"error": {"kind", "message"}}`. Whoever reaches it decides who samples, so it listens on loopback, and nothing is
changed by a request that a page in a browser could make unasked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from infra.bus import Bus
from infra.clock import Clock
from infra.errors import BusError, ConfigError, WaitTimeout
from infra.inference.base import Connect
from infra.loopback import HOST
from rollmill import backends
from schemas.control import Backend

BODY_BYTES = 16_384
"""Largest request, bytes."""

OWN_NAMES = (HOST, "localhost")
"""What a request may call this machine: a page elsewhere may have a name of its own resolve to it."""

FORBIDDEN = HTTPStatus.FORBIDDEN

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a PUT says."""

    url: str
    """Where the engine is."""
    weight: float = 1.0
    """Its share of the work."""
    run: str = ""
    """Only this run's weights are brought into it."""
    force: bool = False
    """Do not ask the engine first."""


class BackendsApi:
    """The routes."""

    def __init__(self, bus: Bus, clock: Clock, connect: Connect, *, url: str) -> None:
        """Build them.

        Args:
            bus: the log, connected.
            clock: for limits.
            connect: makes the client of an engine.
            url: the engine while none is registered.
        """
        self._bus = bus
        self._clock = clock
        self._connect = connect
        self._url = url

    def application(self) -> web.Application:
        """Return the routes."""
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[_told])
        app.add_routes(
            [
                web.get("/backends", self.listed),
                web.put("/backends/{name}", self.put),
                web.put("/backends/{name}/drain", self.drain),
                web.delete("/backends/{name}", self.delete),
            ]
        )
        return app

    async def listed(self, _: web.Request) -> web.Response:
        """Tell what there is."""
        return _json({"backends": await backends.listed(self._bus, self._clock, self._connect, url=self._url)})

    async def put(self, request: web.Request) -> web.Response:
        """Register an engine, or change it."""
        try:
            wanted = msgspec.json.decode(await request.read(), type=Wanted)
        except msgspec.DecodeError as error:
            raise ConfigError(f"the body is not what a backend is registered with: {error}") from error
        backend = Backend(
            name=request.match_info["name"], url=wanted.url.rstrip("/"), weight=wanted.weight, run=wanted.run
        )
        connect = None if wanted.force else self._connect
        return _json(await backends.added(self._bus, self._clock, backend, connect))

    async def drain(self, request: web.Request) -> web.Response:
        """Give an engine nothing new."""
        return _json(await backends.drained(self._bus, self._clock, request.match_info["name"]))

    async def delete(self, request: web.Request) -> web.Response:
        """Forget an engine."""
        return _json(await backends.removed(self._bus, self._clock, request.match_info["name"]))


@asynccontextmanager
async def serving(api: BackendsApi, port: int) -> AsyncIterator[str]:
    """Listen while the block runs; port 0 takes a free one. Gives the address.

    Raises:
        ConfigError: somebody else listens there.
    """
    runner = web.AppRunner(api.application(), access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {HOST}:{port}: {error.strerror}; give another --port") from error
        yield f"http://{HOST}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _json(body: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", status=status)


@web.middleware
async def _told(request: web.Request, handler: Handle) -> web.StreamResponse:
    """Answer with errors that a program can read; nobody is answered who came here by another name."""
    if (request.url.host or "") not in OWN_NAMES:
        return _error(ConfigError(f"{request.host!r} is not what this is called: {' or '.join(OWN_NAMES)}"), FORBIDDEN)
    try:
        return await handler(request)
    except ConfigError as error:
        return _error(error, HTTPStatus.BAD_REQUEST)
    except (BusError, WaitTimeout) as error:
        return _error(error, HTTPStatus.SERVICE_UNAVAILABLE)
    except web.HTTPException as error:
        return _error(error, HTTPStatus(error.status))


def _error(error: Exception, status: HTTPStatus) -> web.Response:
    return _json({"error": {"kind": type(error).__name__, "message": str(error)}}, status)
