"""The chDB engine: the only file that knows its Python interface.

Everything here blocks, so callers run it in threads. A connection is what a session is on a real server: current
database, settings, temporary tables. It carries one statement at a time. One idle connection keeps the engine up,
because the engine stops with its last connection. Opening a second process on the same path fails at once; a fork
after opening hangs, so nothing here forks.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.clickhouse.local_server.errors import from_engine
from infra.errors import ServiceError

QUERY_MEMORY_BYTES = 4 * 1024**3
"""Memory that one query may use unless the client says otherwise (`max_memory_usage`)."""

QUERY_S = 600
"""Seconds that one query may run unless the client says otherwise (`max_execution_time`)."""

BASE_SETTINGS = {
    # chDB reads a bare expression as a SELECT; a real server calls it a syntax error.
    "implicit_select": "0",
    "max_execution_time": str(QUERY_S),
    "max_memory_usage": str(QUERY_MEMORY_BYTES),
}
"""Settings of every connection."""


class EngineUnavailable(ServiceError):
    """The engine cannot be opened on a path."""


@dataclass(frozen=True)
class Result:
    """What a finished statement gave back."""

    data: bytes = b""
    """Its output, in the format asked for."""
    result_rows: int = 0
    """Rows of the output."""
    read_rows: int = 0
    """Rows read from tables."""
    read_bytes: int = 0
    """Bytes read from tables."""
    written_rows: int = 0
    """Rows sent to tables; rows that deduplication left out are counted too."""
    written_bytes: int = 0
    """Bytes sent to tables."""
    elapsed_s: float = 0.0
    """Time inside the engine."""


class Connection:
    """One connection to the engine; used by one thread at a time."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def use(self, database: str) -> None:
        """Make *database* the current one."""
        self._run(f"USE {quote_name(database)}")

    def set(self, settings: Mapping[str, str | None]) -> None:
        """Change settings; None puts one back to the engine's default."""
        if settings:
            # Always quoted: a bare number breaks settings of type text, such as the deduplication token.
            changes = ", ".join(
                f"{quote_name(name)} = {'DEFAULT' if value is None else quote_text(value)}"
                for name, value in settings.items()
            )
            self._run(f"SET {changes}")

    def changed_settings(self) -> dict[str, str]:
        """Return the settings that differ from the engine's defaults."""
        lines = self._run("SELECT name, value FROM system.settings WHERE changed AND name != 'database'").decode()
        pairs = (line.split("\t", 1) for line in lines.splitlines())
        return {name: _unescape(value) for name, value in pairs}

    def current_database(self) -> str:
        """Return the current database."""
        return _unescape(self._run("SELECT currentDatabase()").decode().rstrip("\n"))

    def query(self, sql: str, output_format: str, parameters: Mapping[str, str]) -> Result:
        """Run a statement and return all its output."""
        try:
            raw = self._raw.query(sql, output_format, params=dict(parameters))
        except RuntimeError as error:
            raise from_engine(error) from error
        return Result(
            data=raw.bytes(),
            result_rows=raw.rows_read(),
            read_rows=raw.storage_rows_read(),
            read_bytes=raw.storage_bytes_read(),
            written_rows=raw.rows_written(),
            written_bytes=raw.bytes_written(),
            elapsed_s=raw.elapsed(),
        )

    def stream(self, sql: str, output_format: str, parameters: Mapping[str, str]) -> Generator[bytes, None, None]:
        """Run a SELECT and yield its output block by block; closing the iterator stops the query."""
        try:
            stream = self._raw.send_query(sql, output_format, params=dict(parameters))
        except RuntimeError as error:
            raise from_engine(error) from error
        try:
            while (block := stream.fetch()) is not None:
                yield block.bytes()
        except RuntimeError as error:
            raise from_engine(error) from error
        finally:
            # The connection answers nothing else while a stream is open.
            stream.cancel()

    def insert(self, head: str, input_format: str, data: bytes) -> Result:
        """Run an INSERT with its rows; either all of them are in, or an error is raised."""
        try:
            inserter = self._raw.send_insert(head, input_format)
        except RuntimeError as error:
            raise from_engine(error) from error
        try:
            if data:
                inserter.append(data)
            written = inserter.finish()
        except RuntimeError as error:
            raise from_engine(error) from error
        finally:
            inserter.cancel()  # does nothing after finish()
        return Result(
            written_rows=written.rows_written,
            written_bytes=written.bytes_written,
            elapsed_s=written.elapsed,
        )

    def close(self) -> None:
        """Give the connection back."""
        self._raw.close()

    def _run(self, sql: str) -> bytes:
        return self.query(sql, "TabSeparated", {}).data


class Engine:
    """The chDB engine open on one data path."""

    def __init__(self, path: Path, database: str) -> None:
        self._path = path
        self._database = database
        self._idle: Connection | None = None
        self.timezone = "UTC"

    def open(self) -> None:
        """Start the engine and create the default database.

        Raises:
            EngineUnavailable: chDB is not installed, or another process holds the path.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        self._idle = self._connect()
        # chDB's own `default` is an overlay that cannot hold ordinary tables.
        self._idle.query(
            f"CREATE DATABASE IF NOT EXISTS {quote_name(self._database)} ENGINE = Atomic", "TabSeparated", {}
        )
        self.timezone = self._idle.query("SELECT timezone()", "TabSeparated", {}).data.decode().strip()

    def connection(self) -> Connection:
        """Return a new connection with the base settings."""
        connection = self._connect()
        connection.set(BASE_SETTINGS)
        return connection

    def kill(self, tag: str) -> None:
        """Stop the statement that runs with `log_comment` = *tag*; do nothing if there is none."""
        connection = self._connect()
        try:
            connection.query(f"KILL QUERY WHERE Settings['log_comment'] = {quote_text(tag)} ASYNC", "TabSeparated", {})
        finally:
            connection.close()

    def close(self) -> None:
        """Stop the engine; every other connection must be closed."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def _connect(self) -> Connection:
        try:
            from chdb.state.sqlitelike import connect  # noqa: PLC0415 - 0.5 s, and only this process needs it
        except ImportError as error:
            raise EngineUnavailable(
                "a local ClickHouse needs the package chdb, which is not installed: install `rollmill[local]`,"
                " or name the URL of a ClickHouse server"
            ) from error
        try:
            return Connection(connect(str(self._path)))
        except RuntimeError as error:
            raise EngineUnavailable(
                f"chDB could not open {self._path}: {error}. One process owns a data path: is another"
                " `rollmill clickhouse` running on it?"
            ) from error


def quote_text(text: str) -> str:
    """Return *text* as a SQL string."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def quote_name(name: str) -> str:
    """Return *name* as a SQL identifier."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


def _unescape(text: str) -> str:
    """Undo the escapes of the TabSeparated format that settings and names can hold."""
    pieces = text.split("\\\\")
    for escape, plain in (("\\t", "\t"), ("\\n", "\n"), ("\\'", "'")):
        pieces = [piece.replace(escape, plain) for piece in pieces]
    return "\\".join(pieces)
