"""Sessions: connections that outlive a request.

A request without `session_id` gets a session of its own that ends with it. A named session keeps its database, its
`SET` settings and its temporary tables; it runs one statement at a time (error 373 otherwise) and ends when it was
idle for its timeout. Settings in the URL hold for one statement: they are put back afterwards, so that a
deduplication token cannot reach the next insert of the session and swallow it.

`Sessions` is used from the event loop only; a `Session`'s work runs in threads, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from infra.clickhouse.local_server.engine import BASE_SETTINGS, Connection
from infra.clickhouse.local_server.errors import SESSION_IS_LOCKED, SESSION_NOT_FOUND, refusal

MAX_SESSIONS = 1000
"""Named sessions kept at once; the one idle for longest goes first."""


class Session:
    """One connection, opened at its first statement, and what it must look like between statements."""

    def __init__(self, connect: Callable[[], Connection], database: str) -> None:
        self._connect = connect
        self._connection: Connection | None = None
        self._database = database
        self._own: Mapping[str, str] = dict(BASE_SETTINGS)
        self._prepared = False
        self.busy = True
        self.expires_at = 0.0

    def prepare(self, database: str, settings: Mapping[str, str]) -> Connection:
        """Return the connection with what one request asks for applied."""
        if self._connection is None:
            self._connection = self._connect()
            self._connection.use(self._database)
        self._prepared = False
        if database and database != self._database:
            self._connection.use(database)
        self._connection.set(settings)
        self._prepared = True
        return self._connection

    def restore(self, database: str, settings: Mapping[str, str]) -> None:
        """Undo `prepare`, also one that failed half-way."""
        if self._connection is None:
            return
        # An unknown setting may be why `prepare` failed: put back only what the engine says has changed.
        changed = settings if self._prepared else self._connection.changed_settings()
        self._connection.set({name: self._own.get(name) for name in settings if name in changed})
        if database and database != self._database:
            self._connection.use(self._database)

    def remember(self) -> None:
        """Take the connection's database and settings, after SET or USE, as the session's own."""
        if self._connection is not None:
            self._database = self._connection.current_database()
            self._own = self._connection.changed_settings()

    def close(self) -> None:
        """End the session."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Sessions:
    """The named sessions of a server."""

    def __init__(self, make: Callable[[], Session], now: Callable[[], float]) -> None:
        self._make = make
        self._now = now
        self._named: dict[str, Session] = {}

    def take(self, session_id: str, *, must_exist: bool) -> Session:
        """Return a session, marked busy; a new one if it is not named or not known.

        Raises:
            ServerError: it is busy, or must exist and does not.
        """
        if not session_id:
            return self._make()
        session = self._named.get(session_id)
        if session is None:
            if must_exist:
                raise refusal(SESSION_NOT_FOUND, f"Session {session_id} not found")
            session = self._named[session_id] = self._make()
        elif session.busy:
            raise refusal(SESSION_IS_LOCKED, f"Session {session_id} is locked by a concurrent client")
        session.busy = True
        return session

    def give_back(self, session: Session, timeout_s: float) -> None:
        """Let other requests have a named session."""
        session.busy = False
        session.expires_at = self._now() + timeout_s

    def drop_idle(self) -> list[Session]:
        """Forget the sessions that ran out, and the oldest beyond the limit; return them to be closed."""
        idle = sorted((session.expires_at, name) for name, session in self._named.items() if not session.busy)
        surplus = max(0, len(self._named) - MAX_SESSIONS)
        gone = [name for place, (at, name) in enumerate(idle) if place < surplus or at <= self._now()]
        return [self._named.pop(name) for name in gone]

    def drop_all(self) -> list[Session]:
        """Forget every session; return them to be closed."""
        sessions = list(self._named.values())
        self._named.clear()
        return sessions
