"""Ways to know that a service is ready.

Where a service can say so itself (`says`, `done`) that is waited for; where only a connection can tell (`listens`,
`answers_http`, `answers_kafka`) it is tried every 50 ms, and what the last try found is told with the error. The limit
is kept by the supervisor, and so is the watch for a service that dies meanwhile. `reached` asks the same of what runs
elsewhere and is nobody's child.
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
from rollmill.supervisor.errors import NotReady
from rollmill.supervisor.logfile import LogFile
from rollmill.supervisor.service import READY_LIMIT_S, Ready

RETRY_S = 0.05
"""Pause between two tries of a connection."""

TRY_LIMIT_S = 2.0
"""Longest that one try may take."""


def at_once() -> Ready:
    """Ready as soon as its process runs."""

    async def check(_: LogFile | None) -> None:
        await asyncio.sleep(0)

    return Ready(what="its start", check=check)


def done(*, limit_s: float = READY_LIMIT_S) -> Ready:
    """Ready when it has ended with 0: a task that others build on."""
    return Ready(what="its end with exit code 0", check=None, limit_s=limit_s)


def says(pattern: str, *, what: str = "", limit_s: float = READY_LIMIT_S) -> Ready:
    """Ready when it has written a line that matches a regular expression; `what` tells a person what that means."""
    wanted = re.compile(pattern)

    async def check(log: LogFile | None) -> None:
        assert log is not None, "only a service that is started here has a log"
        await log.said(wanted)

    return Ready(what=what or f"a line like {pattern!r} in its log", check=check, limit_s=limit_s)


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

    return _trying(f"a connection to {address}", connected, limit_s)


def answers_http(url: str, *, limit_s: float = READY_LIMIT_S) -> Ready:
    """Ready when a GET of the URL is answered with 200."""

    async def answered() -> bool:
        # A session per try: it is closed whatever happens, and one try is the usual number.
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            if response.status != HTTPStatus.OK:
                raise ConnectionError(f"it answers {response.status}")
            return True

    return _trying(f"an answer 200 from {url}", answered, limit_s)


def answers_kafka(bootstrap: str, *, limit_s: float = READY_LIMIT_S) -> Ready:
    """Ready when a Kafka node with a registered broker answers at `HOST:PORT`."""
    host, _, port = bootstrap.rpartition(":")

    async def answered() -> bool:
        answer = await asyncio.to_thread(probe.ask, host, int(port))
        return answer is not None and answer.brokers > 0

    return _trying(f"an answer from Kafka at {bootstrap}", answered, limit_s)


async def reached(name: str, ready: Ready, advice: str) -> None:
    """Return once something that runs elsewhere is ready.

    Args:
        name: what it is, such as `clickhouse`.
        ready: how to tell.
        advice: what to do about it.

    Raises:
        NotReady: it was not in time.
    """
    assert ready.check is not None, "what runs elsewhere does not end"
    try:
        async with asyncio.timeout(ready.limit_s):
            await ready.check(None)
    except TimeoutError:
        raise NotReady(f"{name}: {ready.what} did not come in {ready.limit_s:.0f} s{ready.found}; {advice}") from None


class _Tries:
    """Tries again until it is well, and remembers what the last try found."""

    def __init__(self, attempt: Callable[[], Awaitable[bool]]) -> None:
        self._attempt = attempt
        self.last = ""

    async def __call__(self, _: LogFile | None) -> None:
        while True:
            # Refused, closed or too slow: it is not ready yet, which is what is being asked.
            try:
                async with asyncio.timeout(TRY_LIMIT_S):
                    if await self._attempt():
                        return
            except TimeoutError:
                self.last = f"the last try had no answer in {TRY_LIMIT_S:g} s"
            except (OSError, aiohttp.ClientError) as error:
                self.last = f"the last try: {str(error) or type(error).__name__}"
            await asyncio.sleep(RETRY_S)


def _trying(what: str, attempt: Callable[[], Awaitable[bool]], limit_s: float) -> Ready:
    tries = _Tries(attempt)
    return Ready(what=what, check=tries, limit_s=limit_s, why=lambda: tries.last)
