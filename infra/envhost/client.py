"""How the stages talk to environment hosts: a protocol, and its implementation over HTTP.

What every `EnvHostClient` promises: whatever is the system's fault is a `Failure` at the boundary `environment`, ready
to become a record (a lost lease, a host that does not answer, an environment that raised, a bad payload); `Fenced` is
raised when another worker took over, which is nobody's failure: drop the work, publish nothing. Nothing is ever
repeated here: a step whose answer was lost may have been carried out. Every wait has a limit.

`local.py` is the twin without a socket; both pass `tests/contract/test_envhost.py`. `patient.py` waits for a host that
is away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import msgspec
from yarl import URL

from infra.clock import Clock, SystemClock
from infra.envhost.address import Address
from infra.envhost.environment import StepResult
from infra.envhost.lease import Fenced
from infra.envhost.protocol import (
    BadRequest,
    Claimed,
    Closed,
    Counts,
    Create,
    Created,
    Done,
    Held,
    HostFull,
    LeaseOnly,
    Refused,
    Renew,
    Step,
    Stepped,
    Verdict,
    as_error,
    pack,
)
from infra.errors import Failure, ServiceError
from infra.waiting import Wait, waiting
from schemas.message import Part
from schemas.outcome import Boundary, FailureKind

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """How long a client waits."""

    connect_s: float = 5.0
    """For a connection, seconds."""
    call_s: float = 130.0
    """For an answer, seconds: more than the host allows a call into an environment."""
    idle_s: float = 30.0
    """An unused connection is kept this long, seconds: less than the host keeps it."""
    again_s: float = 0.5
    """A full host is not asked again so shortly before the end of the wait, seconds."""
    reply_bytes: int = 16 * 1024 * 1024
    """Largest answer that is read, bytes."""


class Unreachable(ServiceError):
    """The host did not take the call or did not answer it."""


class HostAway(Failure):
    """Nobody answered at the host's address; whether the call was carried out is not known."""

    def __init__(self, cause: str) -> None:
        super().__init__(FailureKind.INFRASTRUCTURE, Boundary.ENVIRONMENT, cause)


class EnvHostClient(Protocol):
    """One environment host, as the stages see it."""

    @property
    def address(self) -> str:
        """Where the host is; goes into the Episode."""
        ...

    async def create(self, request: Create) -> Created | Closed:
        """Build and reset an environment; waits for a free place.

        `Closed`: an output of this very attempt is in the log, or it was cancelled; commit without another one.
        """
        ...

    async def renew(self, lease: str, token: int | None = None) -> None:
        """Postpone the end of a lease: with the claim's token from RUN, without from INIT."""
        ...

    async def ready(self, lease: str) -> bool:
        """Say that the Episode is in the log; False if that did not help (RUN will then find the lease lost)."""
        ...

    async def claim(self, lease: str) -> Claimed | Closed:
        """Take the environment over, at its start.

        `Closed`: an output is in the log, or the sample was cancelled; commit without another one.
        """
        ...

    async def step(self, lease: str, token: int, action: Mapping[str, Any]) -> StepResult:
        """Carry out one action."""
        ...

    async def verdict(self, lease: str, token: int) -> dict[str, Any]:
        """Return the environment's final state; the lease stays claimed until it is closed."""
        ...

    async def close(self, lease: str, token: int) -> bool:
        """Say that an output of this claim is in the log; False if the lease is another's or gone.

        Never raises: the output stands, and what is not closed runs out by itself.
        """
        ...

    async def withdraw(self, lease: str) -> bool:
        """Say that the sample was cancelled and has its terminal record; False if the lease is gone.

        Never raises, as `close`.
        """
        ...

    async def counts(self) -> Counts:
        """Say how the host is."""
        ...

    async def disconnect(self) -> None:
        """Give up connections; the host and its leases go on."""
        ...


class EnvHosts(Protocol):
    """All hosts that Episodes may name."""

    def at(self, address: str) -> EnvHostClient:
        """Return the client of the host at an address."""
        ...

    async def disconnect(self) -> None:
        """Give up all connections."""
        ...


class HttpEnvHost:
    """The client of a host behind a socket.

    Args:
        address: `unix:/path` or `http://HOST:PORT`.
        clock: for pauses between attempts.
        limits: how long to wait.
    """

    def __init__(self, address: str, *, clock: Clock | None = None, limits: ClientLimits | None = None) -> None:
        self._address = Address.parse(address)
        self._clock = clock or SystemClock()
        self._limits = limits or ClientLimits()
        self._session: aiohttp.ClientSession | None = None
        base = "http://environment-host" if self._address.path else str(self._address)
        self._urls = {name: URL(f"{base}/{name}") for name in ("health", *_ANSWERS)}

    @property
    def address(self) -> str:
        """Where the host is."""
        return str(self._address)

    async def create(self, request: Create) -> Created | Closed:
        """Build and reset an environment."""
        # Waiting is not failing: a full host costs the sample no attempt, until the caller's own limit.
        async with waiting(self._clock, f"an environment on {self.address}") as wait:
            return await self._create(request, wait)

    async def _create(self, request: Create, wait: Wait) -> Created | Closed:
        until = self._clock.monotonic() + request.wait_s
        while True:
            left = max(0.0, until - self._clock.monotonic())
            try:
                answer: Created | Closed = await self._post("create", msgspec.structs.replace(request, wait_s=left))
            except BadRequest as error:
                raise _failure(str(error)) from error
            except Unreachable as error:
                raise HostAway(str(error)) from error
            except HostFull as error:
                if self._clock.monotonic() + self._limits.again_s >= until:
                    raise _failure(f"no environment within {request.wait_s:g} s: {error}") from error
                wait.what = f"a place on the environment host at {self.address}"
            else:
                return answer

    async def renew(self, lease: str, token: int | None = None) -> None:
        """Postpone the end of a lease."""
        await self._call("renew", Renew(lease=lease, token=token))

    async def ready(self, lease: str) -> bool:
        """Say that the Episode is in the log."""
        return await self._quietly("ready", LeaseOnly(lease=lease))

    async def claim(self, lease: str) -> Claimed | Closed:
        """Take the environment over, at its start."""
        answer: Claimed | Closed = await self._call("claim", LeaseOnly(lease=lease))
        return answer

    async def step(self, lease: str, token: int, action: Mapping[str, Any]) -> StepResult:
        """Carry out one action."""
        answer: Stepped = await self._call("step", Step(lease=lease, token=token, action=dict(action)))
        return StepResult(answer.observation, answer.done)

    async def verdict(self, lease: str, token: int) -> dict[str, Any]:
        """Return the environment's final state."""
        answer: Verdict = await self._call("verdict", Held(lease=lease, token=token))
        return answer.state

    async def close(self, lease: str, token: int) -> bool:
        """Say that an output of this claim is in the log."""
        return await self._quietly("close", Held(lease=lease, token=token))

    async def withdraw(self, lease: str) -> bool:
        """Say that the sample was cancelled and has its terminal record."""
        return await self._quietly("withdraw", LeaseOnly(lease=lease))

    async def counts(self) -> Counts:
        """Say how the host is."""
        try:
            body = await self._exchange("GET", "health", None)
        except Unreachable as error:
            raise HostAway(str(error)) from error
        try:
            return msgspec.json.decode(body, type=Counts, strict=False)
        except msgspec.DecodeError as error:
            raise HostAway(f"{self.address} answered health with nonsense ({error}): {body[:200]!r}") from error

    async def disconnect(self) -> None:
        """Give up connections."""
        if self._session:
            await self._session.close()
            self._session = None

    async def _quietly(self, name: str, request: Part) -> bool:
        try:
            await self._post(name, request)
        except (Failure, Fenced, Unreachable, BadRequest) as error:
            log.info("%s was of no effect: %s", name, error)
            return False
        return True

    async def _call(self, name: str, request: Part) -> Any:
        try:
            return await self._post(name, request)
        except Unreachable as error:
            raise HostAway(str(error)) from error
        except BadRequest as error:
            raise _failure(str(error)) from error

    async def _post(self, name: str, request: Part) -> Any:
        body = await self._exchange("POST", name, pack(request))
        try:
            answer = _ANSWERS[name].decode(body)
        except msgspec.DecodeError as error:
            raise Unreachable(f"{self.address} answered {name} with nonsense ({error}): {body[:200]!r}") from error
        if isinstance(answer, Refused):
            raise as_error(answer)
        return answer

    async def _exchange(self, method: str, name: str, body: bytes | None) -> bytes:
        if self._session is None:
            self._session = self._connect()
        try:
            async with self._session.request(method, self._urls[name], data=body) as response:
                if (response.content_length or 0) > self._limits.reply_bytes:
                    raise BadRequest(
                        f"the environment host's answer to {name} has {response.content_length} bytes; at most "
                        f"{self._limits.reply_bytes} are read: keep observations and verdicts small"
                    )
                return await response.read()
        except TimeoutError as error:
            limits = f"{self._limits.connect_s:g} s for a connection or {self._limits.call_s:g} s for the answer"
            raise Unreachable(f"waited {limits} to {name} of the environment host at {self.address}") from error
        except aiohttp.ClientError as error:
            raise Unreachable(
                f"{name} did not reach the environment host at {self.address}: {error!r}; is it running?"
            ) from error

    def _connect(self) -> aiohttp.ClientSession:
        idle = self._limits.idle_s
        # No limit on connections: how many episodes are in flight is bounded by the worker, and a heartbeat must not
        # queue behind slow steps.
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(str(self._address.path), limit=0, keepalive_timeout=idle)
            if self._address.path
            else aiohttp.TCPConnector(limit=0, keepalive_timeout=idle)
        )
        timeout = aiohttp.ClientTimeout(
            total=self._limits.call_s, connect=self._limits.connect_s, sock_connect=self._limits.connect_s
        )
        return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)


class HttpEnvHosts:
    """Clients by address, made when first asked for.

    Args:
        clock: handed to the clients.
        limits: handed to the clients.
    """

    def __init__(self, *, clock: Clock | None = None, limits: ClientLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits
        self._clients: dict[str, HttpEnvHost] = {}

    def at(self, address: str) -> HttpEnvHost:
        """Return the client of the host at an address."""
        if address not in self._clients:
            self._clients[address] = HttpEnvHost(address, clock=self._clock, limits=self._limits)
        return self._clients[address]

    async def disconnect(self) -> None:
        """Give up all connections."""
        await asyncio.gather(*(client.disconnect() for client in self._clients.values()))


_ANSWERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "create": msgspec.msgpack.Decoder(Created | Closed | Refused),
    "renew": msgspec.msgpack.Decoder(Done | Refused),
    "ready": msgspec.msgpack.Decoder(Done | Refused),
    "claim": msgspec.msgpack.Decoder(Claimed | Closed | Refused),
    "step": msgspec.msgpack.Decoder(Stepped | Refused),
    "verdict": msgspec.msgpack.Decoder(Verdict | Refused),
    "close": msgspec.msgpack.Decoder(Done | Refused),
    "withdraw": msgspec.msgpack.Decoder(Done | Refused),
}


def _failure(cause: str) -> Failure:
    return Failure(FailureKind.INFRASTRUCTURE, Boundary.ENVIRONMENT, cause)
