"""One question of a person to ClickHouse: it only reads, within limits, and ends on the server once nobody waits.

Two locks keep it from changing anything. Only a statement whose first word reads is sent, since `readonly` lets some
others pass (SET, KILL QUERY, BACKUP); and it is sent with `readonly = 1`, since a statement is more than its first
word. Under that no setting may be changed either, so `SETTINGS readonly = 0` and one's own limits are refused. A user
who may not change these settings keeps the limits that ClickHouse gives it, but not one who may write.

A real server and the local one both honour the settings; `cancel_http_readonly_queries_on_client_close` is the
client library's own, and is what ends a query whose connection is gone. What the tables mean is not known here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from clickhouse_connect.driver.asyncclient import AsyncClient

from infra.clickhouse.client import FAILURES, Address, StoreError, connect, explained
from infra.clickhouse.local_server.errors import READONLY, ServerError
from infra.clickhouse.local_server.statement import READING, Query, parse
from infra.errors import ConfigError, ServiceError

LIMIT_S = 60.0
"""A question takes at most this long unless the caller says otherwise, seconds."""

LONGEST_S = 86_400.0
"""Longest limit that a caller may give, seconds."""

GRACE_S = 5.0
"""ClickHouse looks at the clock between blocks: the client waits this much longer before it hangs up, seconds."""

MAX_ROWS = 1_000_000
"""Most rows of an answer: it is kept in memory as a whole."""

SHOWN_CHARS = 200
"""So many characters of a question are repeated in an error."""

TIMEOUT_EXCEEDED = 159
"""ClickHouse's error code of a query that ran into `max_execution_time`."""

TOO_MANY_ROWS = 396
"""ClickHouse's error code of an answer over `max_result_rows`."""


class OutOfTime(ServiceError):
    """A question ran into its limit, and was stopped."""


@dataclass(frozen=True)
class Answer:
    """What came back."""

    columns: tuple[str, ...]
    """Names, in order."""
    rows: tuple[tuple[Any, ...], ...]
    """Values of the columns, row by row."""


async def ask(address: Address, sql: str, *, limit_s: float = LIMIT_S) -> Answer:
    """Ask one question and return its answer.

    Args:
        address: where ClickHouse is.
        sql: one statement that reads.
        limit_s: longest time it may take.

    Raises:
        ConfigError: it is no statement, several, or one that does more than read.
        OutOfTime: there was no answer in time.
        StoreError: ClickHouse is away, or refuses the question.
    """
    require_reading(sql)
    client = await connect(address, answer_s=limit_s + 2 * GRACE_S)
    try:
        async with asyncio.timeout(limit_s + GRACE_S):
            found = await client.query(sql, settings=_settings(client, limit_s))
    except TimeoutError as error:
        raise OutOfTime(
            f"no answer {GRACE_S:g} s after the limit of {limit_s:g} s; the connection is closed, at which ClickHouse "
            f"stops the query: {_LESS}"
        ) from error
    except FAILURES as error:
        raise _named(error, sql, limit_s) from error
    finally:
        await client.close()
    return Answer(tuple(found.column_names), tuple(tuple(row) for row in found.result_rows))


_LESS = "ask for less (a LIMIT, fewer days, one run), or give it longer with --limit"


def require_reading(sql: str) -> None:
    """Raise ConfigError unless this is one statement that reads."""
    try:
        statement = parse(sql.encode())
    except ServerError as error:
        raise ConfigError(f"ClickHouse was not asked: {error.text}") from error
    if not (isinstance(statement, Query) and statement.reads):
        word = statement.keyword.decode() if isinstance(statement, Query) else "INSERT"
        reads = ", ".join(sorted(known.decode() for known in READING))
        raise ConfigError(
            f"ClickHouse was not asked: `rollmill sql` only reads, and {word[:40]!r} begins no statement that does; "
            f"those begin with {reads}. To change tables use a client of your own (clickhouse-client, curl)"
        )
    if statement.format is not None:
        raise ConfigError(
            f"ClickHouse was not asked: FORMAT {statement.format} is not for here, the rows are printed as a table, "
            "or with --json as JSON: leave it out"
        )


def _settings(client: AsyncClient, limit_s: float) -> dict[str, str]:
    """Return the locks and limits, but those that the user may not change.

    Raises:
        StoreError: the user may write, and may not say that it does not want to.
    """
    wanted = {
        "readonly": "1",
        "max_execution_time": f"{limit_s:g}",
        "max_result_rows": str(MAX_ROWS),
        "result_overflow_mode": "throw",
    }
    fixed = {name: known.value for name, known in client.server_settings.items() if known.readonly}
    if fixed.get("readonly") == "0":
        raise StoreError("this user may write and may not set `readonly`: give one that only reads", passing=False)
    return {name: value for name, value in wanted.items() if name not in fixed}


def _named(error: BaseException, sql: str, limit_s: float) -> ServiceError:
    code = getattr(error, "code", None)
    if code == TIMEOUT_EXCEEDED:
        return OutOfTime(f"no answer within the limit of {limit_s:g} s; ClickHouse stopped the query: {_LESS}")
    if code == TOO_MANY_ROWS:
        return StoreError(f"the answer has over {MAX_ROWS} rows: add a LIMIT, or group them", passing=False)
    if code == READONLY:
        return StoreError(f"ClickHouse refused {_short(sql)}, since it is asked read-only: {error}", passing=False)
    return explained(error, f"asking {_short(sql)}")


def _short(sql: str) -> str:
    return repr(sql) if len(sql) <= SHOWN_CHARS else f"{sql[:SHOWN_CHARS]!r}... ({len(sql)} characters)"
