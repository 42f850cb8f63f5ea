"""Named sessions: found again, one statement at a time, gone when idle."""

from __future__ import annotations

import pytest

from infra.clickhouse.local_server.errors import SESSION_IS_LOCKED, SESSION_NOT_FOUND, ServerError
from infra.clickhouse.local_server.sessions import MAX_SESSIONS, Session, Sessions


class Connection:
    """A connection that remembers what it was told, as the engine's does."""

    def __init__(self) -> None:
        self.settings = {"max_threads": "2"}
        self.database = "rollmill"

    def use(self, database):
        self.database = database

    def set(self, settings):
        if "nosuch" in settings:
            raise ServerError(115, "Code: 115. Unknown setting")
        for name, value in settings.items():
            if value is None:
                self.settings.pop(name)
            else:
                self.settings[name] = value

    def changed_settings(self):
        return dict(self.settings)

    def current_database(self):
        return self.database


class Now:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_sessions():
    now = Now()
    return Sessions(lambda: Session(Connection, "rollmill"), now), now


def test_a_named_session_is_found_again():
    """The same id gives the same session, no id a new one."""
    sessions, _ = make_sessions()
    first = sessions.take("s", must_exist=False)
    sessions.give_back(first, 60)
    assert first is sessions.take("s", must_exist=True)
    assert sessions.take("", must_exist=False) is not sessions.take("", must_exist=False)


def test_a_busy_session_is_locked():
    """Two requests at once in one session would share its connection."""
    sessions, _ = make_sessions()
    sessions.take("s", must_exist=False)
    with pytest.raises(ServerError) as caught:
        sessions.take("s", must_exist=False)
    assert caught.value.code == SESSION_IS_LOCKED


def test_a_session_that_must_exist_is_not_made():
    """`session_check` finds out that a session ran out."""
    sessions, now = make_sessions()
    sessions.give_back(sessions.take("s", must_exist=False), 60)
    now.seconds = 61
    assert len(sessions.drop_idle()) == 1
    with pytest.raises(ServerError) as caught:
        sessions.take("s", must_exist=True)
    assert (caught.value.code, caught.value.status) == (SESSION_NOT_FOUND, 404)


def test_a_busy_session_does_not_run_out():
    """A long query keeps its session."""
    sessions, now = make_sessions()
    sessions.take("s", must_exist=False)
    now.seconds = 10_000
    assert sessions.drop_idle() == []


def test_beyond_the_limit_the_session_idle_for_longest_goes():
    """Clients that never come back cannot fill the server."""
    sessions, now = make_sessions()
    kept = []
    for number in range(MAX_SESSIONS + 1):
        now.seconds = number / 1000
        kept.append(sessions.take(str(number), must_exist=False))
        sessions.give_back(kept[-1], 60)
    assert kept[:1] == sessions.drop_idle()


def test_settings_of_one_statement_do_not_reach_the_next():
    """A deduplication token left behind would swallow the next insert."""
    session = Session(Connection, "rollmill")
    connection = session.prepare("", {})
    session.remember()
    session.prepare("other", {"insert_deduplication_token": "t", "max_threads": "8"})
    session.restore("other", {"insert_deduplication_token": "t", "max_threads": "8"})
    assert (connection.settings, connection.database) == ({"max_threads": "2"}, "rollmill")


def test_a_failed_setting_leaves_the_session_usable():
    """An unknown setting is the request's error, not the session's end."""
    session = Session(Connection, "rollmill")
    connection = session.prepare("", {})
    with pytest.raises(ServerError):
        session.prepare("", {"nosuch": "1"})
    session.restore("", {"nosuch": "1"})
    assert connection.settings == {"max_threads": "2"}
