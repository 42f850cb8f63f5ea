"""Ways to know that a service is ready.

Where a service can say so itself (`says`, `done`) that is waited for; where only a connection can tell (`listens`,
`answers_http`, `answers_kafka`) it is tried every 50 ms. The limit is kept by the supervisor, and so is the watch for
a service that dies meanwhile.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus

import aiohttp

from infra.broker import probe
from infra.envhost.address import Address
from rollmill.supervisor.logfile import LogFile
from rollmill.supervisor.service import READY_LIMIT_S, Ready

RETRY_S = 0.05
"""Pause between two tries of a connection."""

TRY_LIMIT_S = 2.0
"""Longest that one try may take."""


def at_once() -> Ready:
    """Ready as soon as its process runs."""

    async def check(_: LogFile) -> None:
        await asyncio.sleep(0)

    return Ready(what="its start", check=check)


def done(*, limit_s: float = READY_LIMIT_S) -> Ready:
    """Ready when it has ended with 0: a task that others build on."""
    return Ready(what="its end with exit code 0", check=None, limit_s=limit_s)


def says(pattern: str, *, limit_s: float = READY_LIMIT_S) -> Ready:
    """Ready when it has written a line that matches a regular expression."""
    wanted = re.compile(pattern)

    async def check(log: LogFile) -> None:
        await log.said(wanted)

    return Ready(what=f"a line like {pattern!r} in its log", check=check, limit_s=limit_s)


def listens(address: str, *, limit_s: float = READY_LIMIT_S) -> Ready:
    """Ready when `http://HOST:PORT` or the Unix socket `unix:/path` takes a connection."""
    where = Address.parse(address)

    async def connected() -> bool:
        if where.path is not None:
            _, writer = await asyncio.open_unix_connection(where.path)
        else:
            _, writer = await asyncio.open_connection(where.host, where.port)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        return True

    return Ready(what=f"a connection to {address}", check=_retrying(connected), limit_s=limit_s)


def answers_http(url: str, *, limit_s: float = READY_LIMIT_S) -> Ready:
    """Ready when a GET of the URL is answered with 200."""

    async def answered() -> bool:
        # A session per try: it is closed whatever happens, and one try is the usual number.
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status == HTTPStatus.OK

    return Ready(what=f"an answer 200 from {url}", check=_retrying(answered), limit_s=limit_s)


def answers_kafka(bootstrap: str, *, limit_s: float = READY_LIMIT_S) -> Ready:
    """Ready when a Kafka node with a registered broker answers at `HOST:PORT`."""
    host, _, port = bootstrap.rpartition(":")

    async def answered() -> bool:
        answer = await asyncio.to_thread(probe.ask, host, int(port))
        return answer is not None and answer.brokers > 0

    return Ready(what=f"an answer from Kafka at {bootstrap}", check=_retrying(answered), limit_s=limit_s)


def _retrying(attempt: Callable[[], Awaitable[bool]]) -> Callable[[LogFile], Awaitable[None]]:
    async def check(_: LogFile) -> None:
        while True:
            # Refused, closed or too slow: it is not ready yet, which is what is being asked.
            with suppress(OSError, aiohttp.ClientError, TimeoutError):
                async with asyncio.timeout(TRY_LIMIT_S):
                    if await attempt():
                        return
            await asyncio.sleep(RETRY_S)

    return check
