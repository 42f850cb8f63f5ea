"""`rollmill sql` asks one question: it changes nothing, has limits, and ends on the server with its client."""

from __future__ import annotations

import asyncio

import pytest

from infra.clickhouse import question
from infra.clickhouse.client import StoreError, connect
from infra.clickhouse.question import OutOfTime, ask, require_reading
from infra.errors import ConfigError
from tests.integration.clickhouse.helpers import rows_of

pytestmark = pytest.mark.integration

FOREVER = "SELECT sum(sipHash64(number)) AS forever FROM numbers(1000000000000)"


@pytest.fixture
async def kept(address):
    """An address whose database holds one table with one row."""
    client = await connect(address, database="")
    try:
        for sql in ("DROP DATABASE IF EXISTS `{0}`", "CREATE DATABASE `{0}` ENGINE = Atomic",
                    "CREATE TABLE `{0}`.kept (a UInt8) ENGINE = MergeTree ORDER BY a",
                    "INSERT INTO `{0}`.kept SELECT 1"):  # fmt: skip
            await client.command(sql.format(address.database))
    finally:
        await client.close()
    return address


@pytest.mark.parametrize("sql", [
    "SELECT a FROM kept", "(SELECT a FROM kept)", "WITH 1 AS x SELECT x", "SHOW TABLES", "DESCRIBE kept",
    "EXPLAIN SELECT 1", "EXISTS kept", "SELECT a FROM kept;", "/* why */ SELECT a FROM kept -- all",
])  # fmt: skip
async def test_what_reads_is_answered(kept, sql):
    """Rows with their columns' names."""
    found = await ask(kept, sql)

    assert len(found.columns) == len(found.rows[0])


@pytest.mark.parametrize("sql", [
    "DROP TABLE kept", "INSERT INTO kept VALUES (2)", "INSERT INTO kept SELECT 2", "ALTER TABLE kept DELETE WHERE 1",
    "TRUNCATE TABLE kept", "RENAME TABLE kept TO gone", "CREATE TABLE t (a UInt8) ENGINE = Memory", "SET readonly = 0",
    "SELECT 1; DROP TABLE kept", "SELECT a FROM kept SETTINGS readonly = 0", "KILL QUERY WHERE 1", "SYSTEM SHUTDOWN",
    "BACKUP TABLE kept TO File('kept')", "SELECT * FROM file('/etc/hostname', 'LineAsString', 'line String')",
])  # fmt: skip
async def test_what_changes_something_is_refused(kept, sql):
    """By us where its first word says so, and else by ClickHouse; nothing has changed afterwards."""
    with pytest.raises((ConfigError, StoreError), match=r"only reads|read-only|Multi-statements"):
        await ask(kept, sql)

    assert await rows_of(kept, "SELECT a FROM kept") == [(1,)]


@pytest.mark.parametrize("sql", ["DROP TABLE kept", "INSERT INTO kept SELECT 2", "ALTER TABLE kept DELETE WHERE 1"])
async def test_clickhouse_itself_refuses_what_our_look_at_the_statement_lets_through(kept, sql, monkeypatch):
    """The second lock holds without the first."""
    monkeypatch.setattr(question, "require_reading", lambda sql: None)

    with pytest.raises(StoreError, match="read-only"):
        await ask(kept, sql)

    assert await rows_of(kept, "SELECT a FROM kept") == [(1,)]


async def test_a_question_that_takes_too_long_is_stopped_and_says_so(kept):
    """Nothing runs on the server afterwards."""
    with pytest.raises(OutOfTime, match=r"limit of 0\.2 s.*--limit"):
        await ask(kept, FOREVER, limit_s=0.2)

    await until_running(kept, 0)


async def test_a_question_ends_on_the_server_with_whoever_asked(kept):
    """Ctrl-C leaves nothing behind."""
    asked = asyncio.create_task(ask(kept, FOREVER))
    await until_running(kept, 1)

    asked.cancel()

    await until_running(kept, 0)


async def test_an_answer_that_would_not_fit_is_refused(kept, monkeypatch):
    """It is kept in memory as a whole."""
    monkeypatch.setattr(question, "MAX_ROWS", 10)

    with pytest.raises(StoreError, match="over 10 rows: add a LIMIT"):
        await ask(kept, "SELECT number FROM numbers(1000)")


@pytest.mark.parametrize(("sql", "why"), [
    ("", "Empty query"), ("-- nothing", "Empty query"), ("SELEC 1", "'SELEC' begins no statement"),
    ("SELECT 'open", "not closed"), ("SELECT 1 FORMAT CSV", "leave it out"), ("DROP TABLE x", "'DROP' begins no"),
])  # fmt: skip
def test_what_is_no_question_is_not_asked(sql, why):
    """No server is needed to say so."""
    with pytest.raises(ConfigError, match=why):
        require_reading(sql)


async def until_running(address, count):
    """Wait until this many endless queries run."""
    sql = "SELECT count() FROM system.processes WHERE query LIKE '%forever%' AND query NOT LIKE '%processes%'"
    async with asyncio.timeout(60):
        while await rows_of(address, sql) != [(count,)]:
            await asyncio.sleep(0.05)
