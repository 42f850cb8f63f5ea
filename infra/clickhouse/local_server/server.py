"""The HTTP service: requests in, ClickHouse's headers, bodies and errors out.

One process per data path, loopback only. Engine calls block, so they run in a pool of threads; the event loop only
moves bytes. A read whose client goes away is killed; a write runs to its end, because the client may not know yet
that it was accepted. This file does not know chDB or SQL.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import secrets
import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from infra.clickhouse.local_server import request as requests
from infra.clickhouse.local_server.engine import Engine, Result
from infra.clickhouse.local_server.errors import NOT_IMPLEMENTED, TOO_MANY_BYTES, ServerError, refusal
from infra.clickhouse.local_server.execution import Execution
from infra.clickhouse.local_server.request import HttpQuery
from infra.clickhouse.local_server.sessions import Session, Sessions
from infra.clickhouse.local_server.statement import Query, parse
from infra.errors import ConfigError

log = logging.getLogger(__name__)

DATABASE = "rollmill"
"""The database of a request that names none."""

WORKERS = 16
"""Statements that run at once; more wait."""

MAX_URL_BYTES = 1024 * 1024
"""Longest request line: clients may send SQL in the URL."""

STOP_S = 2.0
"""How long a stop waits for running requests before it kills them."""

_CONTENT_TYPES = {
    "CSV": "text/csv; charset=UTF-8; header=absent",
    "CSVWithNames": "text/csv; charset=UTF-8; header=present",
    "JSON": "application/json; charset=UTF-8",
    "JSONCompact": "application/json; charset=UTF-8",
    "JSONEachRow": "application/x-ndjson; charset=UTF-8",
    "TabSeparated": "text/tab-separated-values; charset=UTF-8",
    "TSV": "text/tab-separated-values; charset=UTF-8",
    "Native": "application/octet-stream",
    "RowBinary": "application/octet-stream",
    "Arrow": "application/octet-stream",
    "ArrowStream": "application/octet-stream",
    "Parquet": "application/octet-stream",
}

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Call:
    """What belongs to one running request."""

    query: HttpQuery
    query_id: str
    tag: str
    reads: bool
    execution: Execution


class LocalServer:
    """A ClickHouse-compatible HTTP service over one data path."""

    def __init__(self, path: Path, *, password: str = "", now: Callable[[], float] = time.monotonic) -> None:
        self._engine = Engine(path, DATABASE)
        self._password = password
        self._sessions = Sessions(self._new_session, now)
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="chdb")
        # Kills must get through when every worker is busy with what is to be killed.
        self._killers = ThreadPoolExecutor(2, thread_name_prefix="chdb-kill")
        self._running: set[str] = set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Open the engine and listen; port 0 takes a free one. `url` says where.

        Raises:
            ConfigError: *host* is not a loopback address.
            EngineUnavailable: chDB cannot be opened on the path.
            OSError: the port is taken.
        """
        _require_loopback(host)
        await asyncio.get_running_loop().run_in_executor(self._workers, self._engine.open)
        app = web.Application(client_max_size=requests.MAX_BODY_BYTES)
        app.router.add_get("/ping", _ping)
        app.router.add_get("/replicas_status", _ping)
        app.router.add_route("*", "/", self._handle)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            max_line_size=MAX_URL_BYTES,
            max_field_size=MAX_URL_BYTES,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, shutdown_timeout=STOP_S).start()
        bound_port: int = self._runner.addresses[0][1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"

    async def stop(self) -> None:
        """Finish or kill what runs, close the engine, release the port."""
        if self._runner is not None:
            await self._runner.cleanup()
        loop = asyncio.get_running_loop()
        for tag in list(self._running):
            await loop.run_in_executor(self._killers, self._engine.kill, tag)
        self._killers.shutdown()
        await asyncio.to_thread(self._workers.shutdown)
        for session in self._sessions.drop_all():
            session.close()
        self._engine.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        query_id = ""
        try:
            arguments = dict(request.query.items())
            if request.method in {"GET", "HEAD"} and "query" not in arguments:
                return await _ping(request)
            arguments, body = await _read_body(request, arguments)
            requests.authenticate(arguments, request.headers, self._password)
            query = requests.read(arguments, request.headers, body)
            query_id = query.query_id or str(uuid.uuid4())
            await self._expire_sessions()
            return await self._run(request, query, query_id)
        except web.HTTPRequestEntityTooLarge:
            limit = requests.MAX_BODY_BYTES
            error = refusal(TOO_MANY_BYTES, f"The body is larger than {limit} bytes: send smaller inserts")
        except ServerError as found:
            error = found
        return _error_response(error, query_id)

    async def _run(self, request: web.Request, query: HttpQuery, query_id: str) -> web.StreamResponse:
        statement = parse(query.sql)
        session = self._sessions.take(query.session_id, must_exist=query.session_must_exist)
        # Ids of clients may repeat; a kill must reach this query alone.
        tag = f"{query_id} {secrets.token_hex(4)}"
        execution = Execution(session, query, statement, tag, get=request.method == "GET")
        call = _Call(query, query_id, tag, isinstance(statement, Query) and statement.reads, execution)
        self._running.add(tag)
        try:
            first = await self._in_thread(call, execution.start)
            return await self._respond(request, call, first)
        finally:
            await self._end(call, session)

    async def _end(self, call: _Call, session: Session) -> None:
        """Put the session back whatever happened; a cancelled request must not leave it locked."""
        named = bool(call.query.session_id)
        ending = asyncio.get_running_loop().run_in_executor(
            self._workers, lambda: call.execution.finish(close=not named)
        )

        def ended(_: object) -> None:
            self._running.discard(call.tag)
            self._sessions.give_back(session, call.query.session_timeout_s)

        ending.add_done_callback(ended)
        await asyncio.shield(ending)

    async def _respond(self, request: web.Request, call: _Call, first: list[bytes]) -> web.StreamResponse:
        execution = call.execution
        headers = _headers(call.query_id, execution.format, execution.summary, self._engine.timezone)
        if execution.finished:
            return web.Response(body=b"".join(first), headers=headers)
        exception_tag = secrets.token_hex(8)
        response = web.StreamResponse(headers={**headers, "X-ClickHouse-Exception-Tag": exception_tag})
        await response.prepare(request)
        try:
            for block in first:
                await response.write(block)
            while (block_or_end := await self._in_thread(call, execution.next_block)) is not None:
                await response.write(block_or_end)
        except ServerError as error:
            # The status has gone out already, so the error follows the rows, framed as the real server frames it.
            await response.write(_late_error(error, exception_tag))
        await response.write_eof()
        return response

    async def _in_thread(self, call: _Call, work: Callable[[], _T]) -> _T:
        """Run blocking work; when the client goes away, kill a read and wait for a write."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._workers, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if call.reads:
                await loop.run_in_executor(self._killers, self._engine.kill, call.tag)
            # The connection cannot be put back while the statement still runs on it.
            await asyncio.wait([future])
            if not future.cancelled() and (error := future.exception()) is not None:
                log.info("query %s ended after its client had gone: %s", call.query_id, error)
            raise

    async def _expire_sessions(self) -> None:
        for session in self._sessions.drop_idle():
            await asyncio.get_running_loop().run_in_executor(self._workers, session.close)

    def _new_session(self) -> Session:
        return Session(self._engine.connection, DATABASE)


async def serve(
    path: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    password: str = "",
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; *ready* is called with the URL once requests are answered.

    Raises:
        ConfigError: *host* is not a loopback address.
        EngineUnavailable: chDB cannot be opened on *path*.
        OSError: the port is taken.
    """
    server = LocalServer(path, password=password)
    stopped = asyncio.Event()
    await server.start(host, port)
    loop = asyncio.get_running_loop()
    # After start: the engine installs handlers of its own while it opens.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        log.info("ClickHouse interface over chDB at %s, data in %s", server.url, path)
        if ready is not None:
            ready(server.url)
        await stopped.wait()
    finally:
        await server.stop()


def _require_loopback(host: str) -> None:
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ConfigError(
            f"the local ClickHouse listens on loopback only, not on {host!r}: the engine has no users or grants, so"
            " anyone who reaches it can read this machine's files. For a network, run a ClickHouse server"
        )


async def _ping(_: web.Request) -> web.Response:
    return web.Response(text="Ok.\n", content_type="text/html")


async def _read_body(request: web.Request, arguments: dict[str, str]) -> tuple[dict[str, str], bytes]:
    """Return the arguments with those of a form added, and the body that is left."""
    if not request.content_type.startswith("multipart/"):
        encoding = request.headers.get("Content-Encoding", "").lower()
        return arguments, requests.decode_body(await request.read(), encoding)
    form: dict[str, str] = {}
    for name, value in (await request.post()).items():
        if not isinstance(value, str):
            raise refusal(NOT_IMPLEMENTED, f"external data ({name}) is not supported by the local server")
        form[name] = value
    return {**arguments, **form}, b""


def _headers(query_id: str, output_format: str, result: Result, timezone: str) -> dict[str, str]:
    return {
        "Content-Type": _CONTENT_TYPES.get(output_format, "text/plain; charset=UTF-8"),
        "X-ClickHouse-Format": output_format,
        "X-ClickHouse-Query-Id": query_id,
        "X-ClickHouse-Timezone": timezone,
        "X-ClickHouse-Summary": json.dumps(
            {
                "read_rows": str(result.read_rows),
                "read_bytes": str(result.read_bytes),
                "written_rows": str(result.written_rows),
                "written_bytes": str(result.written_bytes),
                "result_rows": str(result.result_rows),
                "result_bytes": str(len(result.data)),
                "elapsed_ns": str(round(result.elapsed_s * 1e9)),
            }
        ),
    }


def _error_response(error: ServerError, query_id: str) -> web.Response:
    headers = {"X-ClickHouse-Exception-Code": str(error.code)}
    if query_id:
        headers["X-ClickHouse-Query-Id"] = query_id
    return web.Response(status=error.status, text=error.text + "\n", headers=headers)


def _late_error(error: ServerError, tag: str) -> bytes:
    message = error.text.encode() + b"\n"
    mark = tag.encode()
    return b"\r\n__exception__\r\n%s\r\n%s%d %s\r\n__exception__\r\n" % (mark, message, len(message), mark)
