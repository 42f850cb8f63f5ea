"""A statement is split from its data by tokens, whatever the data or the names look like."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.clickhouse.local_server.errors import NOT_IMPLEMENTED, SYNTAX_ERROR, ServerError
from infra.clickhouse.local_server.statement import MAX_STATEMENT_BYTES, Insert, Query, parse


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        (b"SELECT 1", Query("SELECT 1", b"SELECT", None)),
        (b"select 1 format JSON;", Query("select 1 format JSON", b"SELECT", "JSON")),
        (b"SELECT 1 FORMAT CSV SETTINGS max_threads = 1", Query(
            "SELECT 1 FORMAT CSV SETTINGS max_threads = 1", b"SELECT", "CSV")),
        (b"SELECT 1 FORMAT Native -- done", Query("SELECT 1 FORMAT Native -- done", b"SELECT", "Native")),
        (b"/* a /* b */ c */ (SELECT 1)", Query("/* a /* b */ c */ (SELECT 1)", b"SELECT", None)),
        (b"SELECT format FROM t", Query("SELECT format FROM t", b"SELECT", None)),
        (b"SELECT t.format x", Query("SELECT t.format x", b"SELECT", None)),
        (b"SELECT 'FORMAT JSON'", Query("SELECT 'FORMAT JSON'", b"SELECT", None)),
        (b"SELECT $q$ ; FORMAT X $q$", Query("SELECT $q$ ; FORMAT X $q$", b"SELECT", None)),
        (b"SELECT 'it''s; \\' x' ;\n", Query("SELECT 'it''s; \\' x'", b"SELECT", None)),
        (b"INSERT INTO t SELECT 1", Query("INSERT INTO t SELECT 1", b"INSERT", None)),
        (b"INSERT INTO t (a) (SELECT 1)", Query("INSERT INTO t (a) (SELECT 1)", b"INSERT", None)),
    ],
)  # fmt: skip
def test_a_query_has_its_text_first_word_and_output_format(sql, expected):
    """Comments, quotes and columns called `format` change nothing; a closing semicolon goes."""
    assert expected == parse(sql)


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        (b"INSERT INTO t FORMAT CSV\n1,2\n", Insert("INSERT INTO t ", "CSV", b"1,2\n")),
        (b"INSERT INTO t (a, format) FORMAT CSV 1,2", Insert("INSERT INTO t (a, format) ", "CSV", b"1,2")),
        (b"INSERT INTO db.values FORMAT TSV\nx", Insert("INSERT INTO db.values ", "TSV", b"x")),
        (b"INSERT INTO format FORMAT TSV\nx", Insert("INSERT INTO format ", "TSV", b"x")),
        (b"INSERT INTO `FORMAT CSV` FORMAT TSV\nx", Insert("INSERT INTO `FORMAT CSV` ", "TSV", b"x")),
        (b"INSERT INTO t SETTINGS async_insert=0 FORMAT TSV\nx", Insert(
            "INSERT INTO t SETTINGS async_insert=0 ", "TSV", b"x")),
        (b"INSERT INTO FUNCTION null('a Int8') FORMAT TSV\n1", Insert(
            "INSERT INTO FUNCTION null('a Int8') ", "TSV", b"1")),
        (b"INSERT INTO t VALUES (1, 'a;b'), (2, 'c') ;\n", Insert(
            "INSERT INTO t ", "Values", b" (1, 'a;b'), (2, 'c')")),
        (b"INSERT INTO t (a) values(1)", Insert("INSERT INTO t (a) ", "Values", b"(1)")),
        (b"INSERT INTO t FORMAT Native\n\x00\xff;'", Insert("INSERT INTO t ", "Native", b"\x00\xff;'")),
        (b"INSERT INTO t FORMAT TSV\n\n", Insert("INSERT INTO t ", "TSV", b"\n")),
    ],
)  # fmt: skip
def test_an_insert_is_split_where_its_rows_begin(sql, expected):
    """A table or column may be called format or values; rows may hold anything."""
    assert expected == parse(sql)


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        (b"", SYNTAX_ERROR),
        (b" -- only a comment", SYNTAX_ERROR),
        (b"SELECT 1; SELECT 2", SYNTAX_ERROR),
        (b"SELECT 'open", SYNTAX_ERROR),
        (b"SELECT /* open", SYNTAX_ERROR),
        (b"SELECT '\xff'", SYNTAX_ERROR),
        (b"INSERT INTO t FORMAT", SYNTAX_ERROR),
        (b"INSERT INTO t SELECT * FROM input('a Int8') FORMAT CSV\n1", NOT_IMPLEMENTED),
        (b"INSERT INTO t FROM INFILE 'x' FORMAT CSV", NOT_IMPLEMENTED),
        (b"SELECT 1 INTO OUTFILE 'x'", NOT_IMPLEMENTED),
    ],
)
def test_what_cannot_run_as_one_statement_is_refused(sql, code):
    """Nothing is guessed: no statement, two of them, or one that the engine would silently get wrong."""
    with pytest.raises(ServerError) as caught:
        parse(sql)
    assert code == caught.value.code


@given(st.binary(max_size=200))
def test_rows_are_never_changed(data):
    """The bytes after the newline reach the engine as they came."""
    assert data == parse(b"INSERT INTO t FORMAT RowBinary\n" + data).data


@given(st.binary(max_size=300))
def test_any_bytes_are_split_or_refused(sql):
    """Hostile SQL gives a statement or a ServerError, nothing else."""
    with suppress(ServerError):
        assert isinstance(parse(sql), Query | Insert)


def test_hostile_sql_takes_bounded_time():
    """Neither nested comments nor open quotes make splitting slow, and longer SQL is refused."""
    began = time.thread_time()  # other threads of the process have work of their own
    for piece in (b"/*", b"'", b"FORMAT ", b"((((", b"$a"):
        with pytest.raises(ServerError):
            parse(b"SELECT " + piece * (MAX_STATEMENT_BYTES // len(piece) + 1))
    # A second or two, five under a tracer; what grows with the square of the length takes hours.
    assert time.thread_time() - began < 30
