"""One URL says where ClickHouse is; errors say whether waiting helps."""

from __future__ import annotations

import re

import pytest
from clickhouse_connect.driver.exceptions import DatabaseError, DataError, OperationalError

from infra.clickhouse import schema
from infra.clickhouse.client import Address, explained
from infra.errors import ConfigError


def test_a_url_names_everything():
    """User, password, host, port and database; escapes are undone."""
    found = Address.parse("https://me:p%40ss@ch.example:9443/runs")
    assert Address("https", "ch.example", 9443, "me", "p@ss", "runs") == found
    assert not found.local


def test_what_a_url_leaves_out_has_a_default():
    """The bare URL of the local server is enough, and its password is never shown."""
    found = Address.parse("http://127.0.0.1", password="secret")
    assert Address("http", "127.0.0.1", 8123, "default", "secret", "rollmill") == found
    assert found.local
    assert "secret" not in str(found)


@pytest.mark.parametrize("url", ["clickhouse://host:9000", "host:8123", "http://", "http://host:port"])
def test_a_url_that_cannot_work_is_refused(url):
    """Before anything is tried."""
    with pytest.raises(ConfigError, match="ClickHouse URL"):
        Address.parse(url)


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (OperationalError("connection refused"), True),
        (DatabaseError("too many parts", code=252), True),
        (DatabaseError("no such table", code=60), False),
        (DataError("cannot encode"), False),
        (TimeoutError(), True),
    ],
)
def test_only_what_may_mend_itself_is_waited_for(error, passing):
    """An unknown table is unknown again in a second."""
    assert passing is explained(error, "inserting").passing


def test_the_schema_is_a_list_of_statements():
    """Each one creates something or adds a column to what an earlier version made, and can be applied twice."""
    found = schema.statements()
    assert len(found) > 10
    again = re.compile(r"CREATE TABLE IF NOT EXISTS|CREATE OR REPLACE VIEW|ALTER TABLE \w+ ADD COLUMN IF NOT EXISTS")
    assert [] == [text for text in found if not again.match(text)]


def test_nothing_is_counted_by_a_materialized_view_and_every_table_knows_its_last_inserts():
    """A view that stores what it counts would count a repeated insert twice; a plain one counts what is there."""
    found = schema.statements()
    tables = [text for text in found if text.startswith("CREATE TABLE")]
    assert not [text for text in found if "MATERIALIZED" in text.upper()]
    assert tables
    assert all("non_replicated_deduplication_window = " in text for text in tables)
