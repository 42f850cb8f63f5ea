"""One statement on one session: prepare, run, give the output in pieces, put the session back.

All methods block and are called in threads, one after the other. This file does not know HTTP.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator

from infra.clickhouse.local_server.engine import Connection, Result
from infra.clickhouse.local_server.errors import BAD_ARGUMENTS, READONLY, refusal
from infra.clickhouse.local_server.request import HttpQuery
from infra.clickhouse.local_server.sessions import Session
from infra.clickhouse.local_server.statement import Insert, Query, Statement

STREAMED = frozenset(
    {
        "Native",
        "TabSeparated",
        "TSV",
        "TabSeparatedRaw",
        "TSVRaw",
        "CSV",
        "JSONEachRow",
        "JSONCompactEachRow",
        "RowBinary",
    }
)
"""Formats whose blocks can simply follow each other; the engine repeats the header of any other in each block."""

EARLY_BLOCKS = 2
"""Blocks computed before the answer begins, so that an error in them still has its HTTP status."""

WRITES, READS_ALONE, READS_AND_SETS = "0", "1", "2"
"""Levels of the setting `readonly`: anything goes, only what reads, and what reads or changes settings."""


class Execution:
    """The run of one statement."""

    def __init__(self, session: Session, query: HttpQuery, statement: Statement, tag: str, *, get: bool) -> None:
        self._session = session
        self._query = query
        self._statement = statement
        self._read_only = _read_only(query.settings.get("readonly", WRITES), get=get)
        self._blocks: Generator[bytes, None, None] | None = None
        # A SET must last, so nothing is put back after it; USE likewise.
        self._keyword = statement.keyword if isinstance(statement, Query) else b"INSERT"
        self._lasting = self._keyword in {b"SET", b"USE"}
        # `readonly` cannot be put back on a connection, so it never is among what is put back.
        settings = {name: value for name, value in query.settings.items() if name != "readonly"}
        self._settings = {} if self._lasting else {**settings, "log_comment": tag}
        self.summary = Result()
        self.finished = True
        self.format = (statement.format if isinstance(statement, Query) else None) or query.default_format

    def start(self) -> list[bytes]:
        """Run the statement, or begin to, and return the first of its output.

        Raises:
            ServerError: the engine refused it.
        """
        connection = self._session.prepare(self._query.database, self._settings)
        if self._read_only != WRITES:
            self._forbid_changes(connection)
        if isinstance(self._statement, Insert):
            connection.set({f"param_{name}": value for name, value in self._query.parameters.items()})
            self.summary = connection.insert(self._statement.head, self._statement.format, self._statement.data)
            return []
        sql = self._statement.text
        if self._query.buffered or self._keyword != b"SELECT" or self.format not in STREAMED:
            self.summary = connection.query(sql, self.format, self._query.parameters)
            return [self.summary.data]
        self._blocks = connection.stream(sql, self.format, self._query.parameters)
        early = list(itertools.islice(self._blocks, EARLY_BLOCKS))
        self.finished = len(early) < EARLY_BLOCKS
        return early

    def next_block(self) -> bytes | None:
        """Return the next of a streamed output, or None at its end."""
        block = next(self._blocks, None) if self._blocks is not None else None
        self.finished = block is None
        return block

    def finish(self, *, close: bool) -> None:
        """Stop what still runs and put the session back, or close it."""
        if self._blocks is not None:
            self._blocks.close()
        if close:
            self._session.close()
        elif self._lasting:
            self._session.remember()
        else:
            self._session.restore(self._query.database, self._settings)

    def _forbid_changes(self, connection: Connection) -> None:
        """Keep a GET, or a request that says `readonly`, from changing anything, as the real server does."""
        reads = isinstance(self._statement, Query) and self._statement.reads
        # What USE and SET change ends with the request, or is the named session's own; 1 forbids SET all the same.
        harmless = self._lasting and not (self._keyword == b"SET" and self._read_only == READS_ALONE)
        if not (reads or harmless):
            raise refusal(
                READONLY, "Cannot execute query in readonly mode: it is set, or implied by GET; POST without it writes"
            )
        if not self._query.session_id:
            # It cannot be taken back on a connection, so a named session has only the check above.
            connection.set({"readonly": self._read_only})


def _read_only(asked: str, *, get: bool) -> str:
    """Return the level of `readonly` of a request: what it asks for, and of a GET at least that settings may change."""
    if asked not in {WRITES, READS_ALONE, READS_AND_SETS}:
        raise refusal(BAD_ARGUMENTS, f"readonly={asked!r}: 0, 1 or 2")
    return READS_AND_SETS if get and asked == WRITES else asked
