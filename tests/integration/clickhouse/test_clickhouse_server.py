"""The local ClickHouse as its clients see it: clickhouse-connect (sync and async, unmodified) and plain HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import aiohttp
import clickhouse_connect
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

pytestmark = pytest.mark.integration


@pytest.fixture
def client(server):
    with clickhouse_connect.get_client(host="127.0.0.1", port=server.port) as found:
        yield found


@pytest.fixture
async def http(server):
    async with aiohttp.ClientSession(server.url) as session:
        yield session


async def ask(http, sql="", *, method="POST", data=None, **params):
    async with http.request(method, "/", params={"query": sql, **params} if sql else params, data=data) as answer:
        return answer.status, answer.headers, await answer.read()


def test_it_answers_unmodified_clickhouse_connect(client):
    """Queries, parameters, commands and inserts of all common types."""
    client.command(
        "CREATE OR REPLACE TABLE kinds (a UInt64, b String, c Array(Float32), d Nullable(Int32), e DateTime64(3),"
        " f Map(String, Float64), g LowCardinality(String)) ENGINE = MergeTree ORDER BY a"
    )
    rows = [[n, f"x{n}", [0.5, n], None if n % 2 else n, 1_700_000_000_000 + n, {"k": n}, "same"] for n in range(1000)]
    summary = client.insert("kinds", rows)
    assert summary.written_rows == 1000
    found = client.query("SELECT * FROM kinds WHERE a = {n:UInt64} AND b = {s:String}", {"n": 7, "s": "x7"}).result_rows
    assert [row[:4] + row[5:] for row in found] == [(7, "x7", [0.5, 7.0], None, {"k": 7.0}, "same")]
    assert client.command("SELECT count() FROM kinds") == 1000
    assert client.command("SELECT currentDatabase()") == "rollmill"


async def test_it_answers_the_async_client(server):
    """The sink and the check use this one."""
    client = await clickhouse_connect.get_async_client(host="127.0.0.1", port=server.port, compress="zstd")
    try:
        await client.command("CREATE OR REPLACE TABLE two (a UInt32, b String) ENGINE = MergeTree ORDER BY a")
        await client.insert("two", [range(5), list("abcde")], column_oriented=True, column_names=["a", "b"])
        found = await client.query("SELECT sum(a), groupConcat(b) FROM two")
        assert list(found.result_rows) == [(10, "abcde")]
    finally:
        await client.close()


def test_a_streamed_result_is_whole(client):
    """A large SELECT comes block by block; none is lost or repeated."""
    with client.query_rows_stream("SELECT number FROM numbers(300000)") as stream:
        assert sum(range(300_000)) == sum(row[0] for row in stream)


def test_an_error_in_the_middle_of_a_stream_is_raised(client):
    """The status is out by then, so the error follows the rows."""
    sql = "SELECT throwIf(number = 900000, 'late') FROM numbers(1000000) SETTINGS max_block_size = 10000"
    with pytest.raises(Exception, match="late"), client.query_rows_stream(sql) as stream:
        assert sum(1 for _ in stream)


@pytest.mark.parametrize(("sql", "code", "status"), [
    ("SELECT nosuch", "47", 404), ("SELECT * FROM nosuch", "60", 404), ("SELEC 1", "62", 400),
    ("SELECT 1; SELECT 2", "62", 400), ("SELECT 1 FORMAT Nosuch", "73", 404),
    ("INSERT INTO nosuch FORMAT CSV\n1", "60", 404),
])  # fmt: skip
async def test_errors_have_clickhouses_codes(http, sql, code, status):
    """Clients decide by code and status."""
    found, headers, body = await ask(http, data=sql)
    assert (status, code) == (found, headers["X-ClickHouse-Exception-Code"])
    assert body.startswith(f"Code: {code}. DB::Exception:".encode())


async def test_formats_and_summary(http):
    """The format may be in the statement, the URL or a header; the summary says what was read."""
    _, headers, body = await ask(http, "SELECT 1 AS x FORMAT JSON")
    assert (json.loads(body)["data"], headers["X-ClickHouse-Format"]) == ([{"x": 1}], "JSON")
    _, _, body = await ask(http, "SELECT 1, 'a'", default_format="CSV")
    assert body == b'1,"a"\n'
    _, headers, body = await ask(http, "SELECT number FROM numbers(3)", wait_end_of_query="1")
    assert (body, json.loads(headers["X-ClickHouse-Summary"])["result_rows"]) == (b"0\n1\n2\n", "3")


async def test_ways_to_ask(http):
    """GET, body, form fields, and the health check."""
    async with http.get("/ping") as answer:
        assert (answer.status, await answer.text()) == (200, "Ok.\n")
    assert (await ask(http, "SELECT 1", method="GET"))[2] == b"1\n"
    assert (await ask(http, data="SELECT 2"))[2] == b"2\n"
    form = aiohttp.FormData({"query": "SELECT {x:String}", "param_x": "it's"}, default_to_multipart=True)
    assert (await ask(http, data=form))[2] == b"it\\'s\n"


async def test_a_get_changes_nothing(http):
    """As on a real server, GET is read-only."""
    for sql in ("CREATE TABLE no (a Int8) ENGINE = Memory", "INSERT INTO no VALUES (1)", "DROP TABLE no"):
        status, headers, _ = await ask(http, sql, method="GET")
        assert (headers["X-ClickHouse-Exception-Code"], status == 200) == ("164", False)


@pytest.mark.parametrize("session", [{}, {"session_id": "reading"}], ids=["alone", "session"])
async def test_a_request_that_says_readonly_changes_nothing(http, session):
    """Neither data nor settings, whatever the statement says of itself; and it reads as ever."""
    await ask(http, "CREATE OR REPLACE TABLE kept (a UInt8) ENGINE = MergeTree ORDER BY a")
    await ask(http, "INSERT INTO kept VALUES (1)")
    reading = {"readonly": "1", **session}
    for sql in (
        "DROP TABLE kept", "INSERT INTO kept VALUES (2)", "INSERT INTO kept SELECT 2", "TRUNCATE TABLE kept",
        "ALTER TABLE kept DELETE WHERE 1", "CREATE TEMPORARY TABLE t (a UInt8)", "SET readonly = 0",
        "KILL QUERY WHERE 1", "BACKUP TABLE kept TO File('kept')",
    ):  # fmt: skip
        status, headers, _ = await ask(http, sql, **reading)
        assert (headers["X-ClickHouse-Exception-Code"], status == 200) == ("164", False), sql
    assert (await ask(http, "SELECT {x:UInt8} + a FROM kept", param_x="1", **reading))[2] == b"2\n"

    assert (await ask(http, "SELECT count() FROM kept", **session))[2] == b"1\n"


async def test_readonly_holds_for_settings_as_its_level_says(http):
    """1 forbids to change them, 2 allows it, and neither may be taken back by the statement itself."""
    for level, code in (("1", "164"), ("2", None)):
        _, headers, _ = await ask(http, "SELECT 1 SETTINGS max_block_size = 77", readonly=level)
        assert headers.get("X-ClickHouse-Exception-Code") == code
        _, headers, _ = await ask(http, "SELECT 1 SETTINGS readonly = 0", readonly=level)
        assert headers.get("X-ClickHouse-Exception-Code") == "164"
    status, headers, _ = await ask(http, "SELECT 1", readonly="yes")
    assert (status, headers["X-ClickHouse-Exception-Code"]) == (400, "36")


async def test_insert_formats(http):
    """Rows come in the body, whether the statement is there too or in the URL."""
    await ask(http, "CREATE OR REPLACE TABLE f (a UInt8, b String) ENGINE = MergeTree ORDER BY a")
    await ask(http, "INSERT INTO f FORMAT CSV", data=b"1,x\n")
    await ask(http, data=b'INSERT INTO f FORMAT JSONEachRow\n{"a":2,"b":"y"}')
    await ask(http, data=b"INSERT INTO f VALUES (3, 'z;'), (4, upper('q'));")
    await ask(http, "INSERT INTO f SELECT 5, {s:String}", param_s="p")
    assert (await ask(http, "SELECT * FROM f ORDER BY a"))[2] == b"1\tx\n2\ty\n3\tz;\n4\tQ\n5\tp\n"
    status, _, _ = await ask(http, "INSERT INTO f FORMAT CSV", data=b"6,ok\nbad\n")
    assert (status, (await ask(http, "SELECT count() FROM f"))[2]) == (400, b"5\n")


async def test_a_named_session_keeps_its_state_and_nothing_else(http):
    """Temporary tables and SET last; settings in the URL do not, or a token would swallow the next insert."""
    await ask(http, "CREATE OR REPLACE TABLE s (a UInt8) ENGINE = MergeTree ORDER BY a"
                    " SETTINGS non_replicated_deduplication_window = 100")  # fmt: skip
    in_session = {"session_id": "one"}
    await ask(http, "CREATE TEMPORARY TABLE mine (a UInt8)", **in_session)
    await ask(http, "SET max_threads = 3", **in_session)
    await ask(http, "INSERT INTO s VALUES (1)", insert_deduplication_token="t", **in_session)
    await ask(http, "INSERT INTO s VALUES (2)", **in_session)
    assert (await ask(
        http,
        "SELECT (SELECT count() FROM s), (SELECT count() FROM mine), getSetting('max_threads'),"
        " getSetting('insert_deduplication_token')",
        **in_session,
    ))[2] == b"2\t0\t3\t\n"  # fmt: skip
    status, headers, _ = await ask(http, "SELECT 1", session_id="none", session_check="1")
    assert (status, headers["X-ClickHouse-Exception-Code"]) == (404, "372")


async def test_a_session_runs_one_statement_at_a_time(http):
    """A second one is refused while the first runs, and the session works afterwards."""
    slow = asyncio.create_task(ask(http, "SELECT sleepEachRow(1) AS slow", session_id="b"))
    await until_running(http, "sleepEachRow", 1)
    status, headers, _ = await ask(http, "SELECT 1", session_id="b")
    assert (status, headers["X-ClickHouse-Exception-Code"]) == (500, "373")
    assert (await slow)[2] == b"0\n"
    assert (await ask(http, "SELECT 1", session_id="b"))[2] == b"1\n"


async def test_a_query_ends_with_its_client(http):
    """A closed request kills what it asked for."""
    asked = asyncio.create_task(ask(http, "SELECT sum(sipHash64(number)) AS forever FROM numbers(1000000000000)"))
    await until_running(http, "forever", 1)
    asked.cancel()
    await until_running(http, "forever", 0)

    assert (await ask(http, "SELECT 1"))[2] == b"1\n"


async def until_running(http, words, count):
    """Wait until this many statements with these words run."""
    sql = f"SELECT count() FROM system.processes WHERE query LIKE '%{words}%' AND query NOT LIKE '%processes%'"
    async with asyncio.timeout(20):
        while int((await ask(http, sql))[2]) != count:
            await asyncio.sleep(0.01)


async def test_what_is_not_supported_says_so(http):
    """Never a wrong answer."""
    for params in ({"compress": "1"}, {"decompress": "1"}, {"role": "r"}):
        status, headers, _ = await ask(http, "SELECT 1", **params)
        assert (status, headers["X-ClickHouse-Exception-Code"]) == (501, "48")
    status, headers, _ = await ask(http, "SELECT 1", user="somebody")
    assert (status, headers["X-ClickHouse-Exception-Code"]) == (403, "516")


def test_many_clients_at_once(server):
    """Concurrent clients get their own answers."""
    wrong = []

    def work(number: int) -> None:
        asked = [number * 100 + turn for turn in range(10)]
        with clickhouse_connect.get_client(host="127.0.0.1", port=server.port) as client:
            wrong.extend(value for value in asked if client.command(f"SELECT {value}") != value)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_second_process_on_the_same_path_says_who_is_there(server):
    """One process owns a data path."""
    result = run_server("--path", server.path)
    assert result.returncode == 1
    assert "one process owns a data path" in result.stderr.lower()


def test_it_refuses_to_listen_beyond_loopback(tmp_path):
    """The engine has no users: whoever reaches it may read this machine's files."""
    result = run_server("--path", tmp_path, "--host", "0.0.0.0")
    assert result.returncode == 1
    assert "loopback only" in result.stderr


def run_server(*arguments):
    command = [sys.executable, "-m", "infra.clickhouse.local_server", "--port", "0", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3], check=False
    )


def test_it_stops_cleanly_and_finds_its_data_again(own_server):
    """SIGTERM ends it with code 0, also with a query running; the data is there after a restart."""
    with clickhouse_connect.get_client(host="127.0.0.1", port=own_server.port) as client:
        client.command("CREATE TABLE kept (a UInt8) ENGINE = MergeTree ORDER BY a")
        client.command("INSERT INTO kept VALUES (1)")
        asking = threading.Thread(
            target=swallow, args=(client, "SELECT sum(sipHash64(number)) FROM numbers(1000000000000)")
        )
        asking.start()
        assert own_server.stop() == 0
        asking.join(30)
    own_server.start()
    with clickhouse_connect.get_client(host="127.0.0.1", port=own_server.port) as client:
        assert client.command("SELECT count() FROM kept") == 1


def swallow(client, sql):
    with pytest.raises(DatabaseError):
        client.command(sql)
