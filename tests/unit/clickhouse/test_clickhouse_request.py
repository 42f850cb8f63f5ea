"""An HTTP request says what ClickHouse is asked for; what it says wrongly is named."""

from __future__ import annotations

import gzip
import zlib
from base64 import b64encode

import pytest
import zstandard

from infra.clickhouse.local_server import request
from infra.clickhouse.local_server.errors import (
    AUTHENTICATION_FAILED,
    CANNOT_DECOMPRESS,
    INVALID_SESSION_TIMEOUT,
    NOT_IMPLEMENTED,
    TOO_MANY_BYTES,
    ServerError,
    from_engine,
)


def test_what_is_not_an_argument_is_a_setting():
    """The interface's own arguments, parameters and settings share the URL."""
    query = request.read(
        {"query": "SELECT 1", "param_x": "5", "max_threads": "2", "database": "d", "client_protocol_version": "54405"},
        {},
        b"",
    )
    assert (
        query.parameters,
        query.settings,
        query.database,
        query.sql,
    ) == ({"x": "5"}, {"max_threads": "2"}, "d", b"SELECT 1")


def test_the_body_follows_the_query():
    """An INSERT in the URL gets its rows from the body."""
    assert request.read({"query": "INSERT INTO t FORMAT CSV"}, {}, b"1").sql == b"INSERT INTO t FORMAT CSV\n1"


@pytest.mark.parametrize("name", ["compress", "decompress", "role"])
def test_unsupported_arguments_are_refused(name):
    """A client that needs what is not there is told so, not answered wrongly."""
    with pytest.raises(ServerError, match=name) as caught:
        request.read({name: "1"}, {}, b"")
    assert (caught.value.code, caught.value.status) == (NOT_IMPLEMENTED, 501)


@pytest.mark.parametrize("timeout", ["-1", "x", "3601"])
def test_a_bad_session_timeout_is_refused(timeout):
    """Seconds, with an upper bound."""
    with pytest.raises(ServerError) as caught:
        request.read({"session_timeout": timeout}, {}, b"")
    assert caught.value.code == INVALID_SESSION_TIMEOUT


@pytest.mark.parametrize(
    ("arguments", "headers"),
    [
        ({}, {"Authorization": "Basic " + b64encode(b"default:secret").decode()}),
        ({}, {"X-ClickHouse-User": "default", "X-ClickHouse-Key": "secret"}),
        ({"user": "default", "password": "secret"}, {}),
    ],
)
def test_the_password_may_come_in_three_ways(arguments, headers):
    """Basic authentication, ClickHouse's headers, or the URL."""
    request.authenticate(arguments, headers, "secret")
    with pytest.raises(ServerError) as caught:
        request.authenticate(arguments, headers, "other")
    assert caught.value.code == AUTHENTICATION_FAILED


@pytest.mark.parametrize("header", ["Basic !!!", "Bearer abc"])
def test_an_authorization_that_is_not_basic_is_refused(header):
    """It is never taken for no authorization."""
    with pytest.raises(ServerError) as caught:
        request.authenticate({}, {"Authorization": header}, "")
    assert caught.value.code == AUTHENTICATION_FAILED


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("", bytes), ("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstandard.compress)],
)
def test_bodies_are_decompressed(encoding, pack):
    """Each encoding gives back what was packed."""
    assert request.decode_body(pack(b"rows" * 100), encoding) == b"rows" * 100


def test_a_body_that_is_not_what_it_says_is_refused():
    """Broken compression is the client's error."""
    with pytest.raises(ServerError) as caught:
        request.decode_body(b"nonsense", "zstd")
    assert caught.value.code == CANNOT_DECOMPRESS


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
def test_a_small_body_cannot_grow_beyond_the_limit(monkeypatch, encoding, pack):
    """A compression bomb stops at the limit."""
    monkeypatch.setattr(request, "MAX_BODY_BYTES", 1 << 20)
    with pytest.raises(ServerError) as caught:
        request.decode_body(pack(bytes(8 << 20)), encoding)
    assert (caught.value.code, caught.value.status) == (TOO_MANY_BYTES, 413)


@pytest.mark.parametrize(
    ("text", "code", "status"),
    [
        ("Failed: Code: 60. DB::Exception: no table (UNKNOWN_TABLE)", 60, 404),
        ("Code: 62. DB::Exception: x (SYNTAX_ERROR)", 62, 400),
        ("Code: 241. DB::Exception: memory", 241, 500),
        ("something without a code", 1002, 500),
    ],
)
def test_an_engine_error_keeps_its_code(text, code, status):
    """Clients decide by code and status; the text starts with the code."""
    error = from_engine(RuntimeError(text))
    assert (code, status) == (error.code, error.status)
    assert error.text.startswith(f"Code: {code}.")
