"""How to reach ClickHouse: one URL for a real server and for the local one.

`http[s]://[user[:password]@]host[:port][/database]`. Whether a failed insert may succeed later is decided here, by
ClickHouse's error code; everything that is not known to be final counts as passing.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit

import aiohttp
import clickhouse_connect
from clickhouse_connect.driver.asyncclient import AsyncClient
from clickhouse_connect.driver.exceptions import (
    ClickHouseError,
    DataError,
    NotSupportedError,
    ProgrammingError,
)

from infra.errors import ConfigError, ServiceError

DATABASE = "rollmill"
"""The database, unless a URL or the configuration names another."""

CONNECT_S = 5
"""Seconds to wait for a connection."""

ANSWER_S = 120
"""Seconds to wait for the answer to one query or insert."""

DEFAULT_PORTS = {"http": 8123, "https": 8443}

FINAL_CODES = frozenset({6, 16, 27, 36, 44, 46, 47, 50, 53, 60, 62, 70, 73, 81, 115, 117, 192, 193, 194, 497, 516})
"""Errors that the same request would meet again: unknown names, wrong types, bad syntax, no access."""


class StoreError(ServiceError):
    """ClickHouse refused a request for good, or is away.

    Attributes:
        passing: the same request may succeed later.
    """

    def __init__(self, text: str, *, passing: bool) -> None:
        super().__init__(text)
        self.passing = passing


@dataclass(frozen=True)
class Address:
    """Where a ClickHouse server answers."""

    interface: str
    host: str
    port: int
    user: str
    password: str
    database: str

    @classmethod
    def parse(cls, url: str, *, database: str = DATABASE, user: str = "default", password: str = "") -> Address:
        """Read a URL; the other arguments stand in for what it leaves out.

        Raises:
            ConfigError: it is not one of ClickHouse's HTTP interface.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"the ClickHouse URL {url!r} has a bad port: {error}") from error
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise ConfigError(
                f"the ClickHouse URL {url!r} should read http://user:password@host:8123/database"
                " (or https); the native protocol is not spoken"
            )
        return cls(
            interface=parts.scheme,
            host=parts.hostname,
            port=port or DEFAULT_PORTS[parts.scheme],
            user=unquote(parts.username) if parts.username else user,
            password=unquote(parts.password) if parts.password else password,
            database=unquote(parts.path.strip("/")) or database,
        )

    @property
    def local(self) -> bool:
        """Tell whether it is this machine, where compression costs more than it saves."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"{self.interface}://{self.host}:{self.port}/{self.database}"


FAILURES = (ClickHouseError, aiohttp.ClientError, TimeoutError, OSError)
"""What a call of the client library raises when ClickHouse refuses or is away."""


async def connect(address: Address, *, database: str | None = None, answer_s: float = ANSWER_S) -> AsyncClient:
    """Return a client of the address.

    Args:
        address: where ClickHouse is.
        database: the current one; empty for the server's own default.
        answer_s: longest wait for one answer, seconds.

    Raises:
        StoreError: nothing answers there, or it refuses.
    """
    try:
        return await clickhouse_connect.get_async_client(
            host=address.host,
            port=address.port,
            interface=address.interface,
            username=address.user,
            password=address.password,
            database=(address.database if database is None else database) or "__default__",
            compress=not address.local,
            connect_timeout=CONNECT_S,
            send_receive_timeout=answer_s,
        )
    except FAILURES as error:
        raise explained(error, f"connecting to ClickHouse at {address}") from error


def explained(error: BaseException, tried: str) -> StoreError:
    """Return an error of the client library as one of ours."""
    final = isinstance(error, DataError | NotSupportedError | ProgrammingError)
    passing = not final and getattr(error, "code", None) not in FINAL_CODES
    return StoreError(f"{tried}: {str(error).strip() or type(error).__name__}", passing=passing)
