"""The environment host as a service: msgpack over HTTP on a Unix socket or a TCP port.

One POST per operation, one GET for the counts by state. Every answer, also a refusal, is a msgpack map whose `type`
says what it is; the HTTP status only repeats it for people with curl. There is no authentication: a Unix socket is for
its owner alone, a TCP port should be a loopback or a private one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

import msgspec
from aiohttp import web

from infra.cancellation import Cancellation
from infra.clock import Clock
from infra.envhost import protocol
from infra.envhost.address import Address
from infra.envhost.environment import EnvironmentFactory
from infra.envhost.host import EnvHost, HostLimits, nobody
from infra.envhost.lease import Fenced, LeaseKey
from infra.errors import ConfigError, Failure, RollmillError
from schemas.message import Part

log = logging.getLogger(__name__)

BODY_BYTES = 16 * 1024 * 1024
"""Largest request body that is read, bytes: a payload with its files."""

IDLE_S = 3600.0
"""An idle connection is kept this long, seconds: longer than clients keep theirs, so that no request meets a closing
connection."""

SHUTDOWN_S = 2.0
"""Requests in flight at a stop may end within this many seconds."""

MSGPACK = "application/msgpack"
"""Content type of every answer."""

R = TypeVar("R", bound=Part)

Operation = Callable[[bytes], Awaitable[protocol.Answer]]


class EnvHostServer:
    """Serves one host while it is entered; `address` is where it really listens.

    Args:
        address: `unix:/path` or `http://HOST:PORT`; port 0 lets the machine choose.
        factory: builds environments.
        clock: for leases and waits.
        limits: what the host takes on.
        withdrawn: tells whether a sample was cancelled.
    """

    def __init__(
        self,
        address: str,
        factory: EnvironmentFactory,
        *,
        clock: Clock | None = None,
        limits: HostLimits | None = None,
        withdrawn: Callable[[LeaseKey], bool] = nobody,
    ) -> None:
        self.address = address
        self.host = EnvHost(factory, clock=clock, limits=limits, withdrawn=withdrawn)
        self._operations = _operations(self.host)
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_post("/{operation}", self._operate)
        # A caller who hangs up stops waiting for a place; a call into an environment goes on to its end.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=IDLE_S,
            shutdown_timeout=SHUTDOWN_S,
        )

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            ConfigError: the address is taken or cannot be listened on.
        """
        address = Address.parse(self.address)
        await self._runner.setup()
        try:
            site = await _site(self._runner, address)
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"cannot listen on {self.address}: {error}; is another environment host there?"
            ) from error
        if address.path:
            address.path.chmod(0o600)
        else:
            self.address = str(Address(None, address.host, self._runner.addresses[0][1]))
        self._reaper = asyncio.create_task(self.host.run())
        log.info("environment host %s listens on %s", self.host.instance, self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, then close all environments."""
        self._reaper.cancel()
        await self._runner.cleanup()
        await self.host.stop()
        if path := Address.parse(self.address).path:
            path.unlink(missing_ok=True)

    async def _operate(self, request: web.Request) -> web.Response:
        name = request.match_info["operation"]
        operation = self._operations.get(name)
        if operation is None:
            return _refuse(404, f"unknown operation {name!r}; known: {', '.join(self._operations)}")
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _refuse(413, f"the body of {name} exceeds {BODY_BYTES} bytes; send large inputs as a reference")
        try:
            answer = await operation(body)
        except msgspec.DecodeError as error:
            return _refuse(400, f"cannot read the body of {name}: {error}")
        except (Failure, Fenced, protocol.HostFull) as error:
            return web.Response(
                body=protocol.pack(protocol.refusal(error)), status=_status(error), content_type=MSGPACK
            )
        return web.Response(body=protocol.pack(answer), content_type=MSGPACK)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response(msgspec.to_builtins(self.host.counts()))


async def serve(
    address: str,
    factory: EnvironmentFactory,
    *,
    stop: asyncio.Event,
    clock: Clock | None = None,
    limits: HostLimits | None = None,
    started: Callable[[str], None] | None = None,
    cancellation: Cancellation | None = None,
) -> None:
    """Serve an environment host until `stop` is set; then close all environments.

    Args:
        address: where to listen.
        factory: builds environments.
        stop: ends the service.
        clock: for leases and waits.
        limits: what the host takes on.
        started: told the address once the host listens.
        cancellation: what is withdrawn, followed already; its environments are closed at once.

    Raises:
        ConfigError: the address is taken or cannot be listened on.
    """

    def withdrawn(key: LeaseKey) -> bool:
        return cancellation is not None and cancellation.cancels.of(key.run, key.group, key.sample) is not None

    async with EnvHostServer(address, factory, clock=clock, limits=limits, withdrawn=withdrawn) as server:
        if cancellation is not None:
            cancellation.tell(server.host.sweep)
        if started:
            started(server.address)
        await stop.wait()


def _operations(host: EnvHost) -> dict[str, Operation]:
    async def renew(request: protocol.Renew) -> protocol.Done:
        await host.renew(request.lease, request.token)
        return protocol.Done()

    async def ready(request: protocol.LeaseOnly) -> protocol.Done:
        await host.ready(request.lease)
        return protocol.Done()

    async def claim(request: protocol.LeaseOnly) -> protocol.Answer:
        return await host.claim(request.lease)

    async def step(request: protocol.Step) -> protocol.Stepped:
        return await host.step(request.lease, request.token, request.action)

    async def verdict(request: protocol.Held) -> protocol.Verdict:
        return protocol.Verdict(state=await host.verdict(request.lease, request.token))

    async def close(request: protocol.Held) -> protocol.Done:
        await host.close(request.lease, request.token)
        return protocol.Done()

    async def withdraw(request: protocol.LeaseOnly) -> protocol.Done:
        await host.withdraw(request.lease)
        return protocol.Done()

    return {
        "create": _reading(protocol.Create, host.create),
        "renew": _reading(protocol.Renew, renew),
        "ready": _reading(protocol.LeaseOnly, ready),
        "claim": _reading(protocol.LeaseOnly, claim),
        "step": _reading(protocol.Step, step),
        "verdict": _reading(protocol.Held, verdict),
        "close": _reading(protocol.Held, close),
        "withdraw": _reading(protocol.LeaseOnly, withdraw),
    }


def _reading(kind: type[R], handle: Callable[[R], Awaitable[protocol.Answer]]) -> Operation:
    decoder = msgspec.msgpack.Decoder(kind)

    def operation(body: bytes) -> Awaitable[protocol.Answer]:
        return handle(decoder.decode(body))

    return operation


def _status(error: RollmillError) -> int:
    match error:
        case protocol.HostFull():
            return 503
        case Fenced():
            return 409
        case _:
            return 422


def _refuse(status: int, text: str) -> web.Response:
    refused = protocol.Refused(reason="bad_request", text=text)
    return web.Response(body=protocol.pack(refused), status=status, content_type=MSGPACK)


async def _site(runner: web.AppRunner, address: Address) -> web.BaseSite:
    if address.path is None:
        return web.TCPSite(runner, address.host, address.port)
    # A socket file outlives its server, and listening would take a living one's place without a word.
    if address.path.is_socket() and await asyncio.to_thread(_answers, str(address.path)):
        raise OSError("somebody listens there already")
    return web.UnixSite(runner, str(address.path))


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
