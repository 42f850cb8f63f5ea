"""What an HTTP request asks of ClickHouse: SQL, settings, parameters, session. Pure.

The URL mixes the interface's own arguments with the engine's settings: whatever is not one of ours is a setting, and
the engine says whether it exists. This file does not know SQL or chDB.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import hmac
import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import zstandard

from infra.clickhouse.local_server.errors import (
    AUTHENTICATION_FAILED,
    BAD_ARGUMENTS,
    CANNOT_DECOMPRESS,
    INVALID_SESSION_TIMEOUT,
    NOT_IMPLEMENTED,
    TOO_MANY_BYTES,
    refusal,
)

USER: Final = "default"
"""The only user."""

DEFAULT_FORMAT = "TabSeparated"
"""Output format when neither the statement nor the request names one."""

DEFAULT_SESSION_TIMEOUT_S = 60
"""How long an idle session is kept unless the request says otherwise."""

MAX_SESSION_TIMEOUT_S = 3600
"""The longest that a request may ask for."""

MAX_BODY_BYTES = 512 * 1024 * 1024
"""Largest request body, before and after decompression."""

_ARGUMENTS = frozenset(
    {
        "query",
        "database",
        "query_id",
        "session_id",
        "session_timeout",
        "session_check",
        "default_format",
        "wait_end_of_query",
        "user",
        "password",
    }
)
"""Arguments of the interface that are read here; `param_*` as well."""

_IGNORED = frozenset({"buffer_size", "client_protocol_version", "quota_key", "stacktrace", "close_session"})
"""Arguments that change nothing here: they tune what this server does not do."""

_UNSUPPORTED = {
    "compress": "native block compression",
    "decompress": "native block compression",
    "role": "roles",
}
"""Arguments that ask for what this server does not do, and what that is."""


@dataclass(frozen=True)
class HttpQuery:
    """One request, read."""

    sql: bytes
    """The URL's `query`, a newline, and the body."""
    settings: dict[str, str]
    """Engine settings for this query alone."""
    parameters: dict[str, str]
    """Values of `{name:Type}` in the statement."""
    database: str
    """The current database; empty for the default one."""
    query_id: str
    """The client's name for the query; empty if it gave none."""
    session_id: str
    """The session to run in; empty for none."""
    session_timeout_s: int
    """How long the session may be idle afterwards."""
    session_must_exist: bool
    """The session must be known already."""
    default_format: str
    """Output format if the statement names none."""
    buffered: bool
    """Answer only when the whole result is there, so that any error has its status."""


def read(arguments: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> HttpQuery:
    """Read the arguments (of URL and form), headers and body of a request.

    Raises:
        ServerError: an argument is malformed or asks for what this server does not do.
    """
    for name, what in _UNSUPPORTED.items():
        if arguments.get(name, "0") not in {"0", ""}:
            raise refusal(NOT_IMPLEMENTED, f"{what} ({name}=) is not supported by the local server")
    known = {name: arguments.get(name, "") for name in _ARGUMENTS}
    sql = known["query"].encode()
    return HttpQuery(
        sql=sql + b"\n" + body if sql and body else sql or body,
        settings={name: value for name, value in arguments.items() if _is_setting(name)},
        parameters={
            name.removeprefix("param_"): value for name, value in arguments.items() if name.startswith("param_")
        },
        database=known["database"] or headers.get("X-ClickHouse-Database", ""),
        query_id=known["query_id"],
        session_id=known["session_id"],
        session_timeout_s=_session_timeout(known["session_timeout"]),
        session_must_exist=known["session_check"] == "1",
        default_format=known["default_format"] or headers.get("X-ClickHouse-Format", DEFAULT_FORMAT),
        buffered=known["wait_end_of_query"] == "1",
    )


def _is_setting(name: str) -> bool:
    return not (name in _ARGUMENTS or name in _IGNORED or name in _UNSUPPORTED or name.startswith("param_"))


def _session_timeout(text: str) -> int:
    if not text:
        return DEFAULT_SESSION_TIMEOUT_S
    if not text.isascii() or not text.isdigit() or int(text) > MAX_SESSION_TIMEOUT_S:
        raise refusal(
            INVALID_SESSION_TIMEOUT,
            f"Invalid session timeout {text!r}: seconds, at most {MAX_SESSION_TIMEOUT_S}",
        )
    return int(text)


def authenticate(arguments: Mapping[str, str], headers: Mapping[str, str], password: str) -> None:
    """Raise ServerError unless the request names the one user and its password."""
    user, given = _credentials(arguments, headers)
    if user != USER or not hmac.compare_digest(given.encode(), password.encode()):
        raise refusal(
            AUTHENTICATION_FAILED,
            f"{user}: Authentication failed: password is incorrect, or there is no user with such name."
            f" This server has one user, {USER!r}",
        )


def _credentials(arguments: Mapping[str, str], headers: Mapping[str, str]) -> tuple[str, str]:
    scheme, _, encoded = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise refusal(AUTHENTICATION_FAILED, "Authorization: Basic must hold base64 of user:password") from error
        return user, password
    if scheme:
        raise refusal(AUTHENTICATION_FAILED, f"Authorization scheme {scheme!r} is not supported: use Basic")
    user = headers.get("X-ClickHouse-User") or arguments.get("user") or USER
    return user, headers.get("X-ClickHouse-Key") or arguments.get("password") or ""


def decode_body(body: bytes, encoding: str) -> bytes:
    """Undo a Content-Encoding.

    Raises:
        ServerError: the encoding is unknown, the bytes are not of it, or the result is too large.
    """
    try:
        if encoding in {"", "identity"}:
            plain = body
        elif encoding == "zstd":
            plain = _bounded(zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body), read_across_frames=True))
        elif encoding == "gzip":
            plain = _bounded(gzip.GzipFile(fileobj=io.BytesIO(body)))
        elif encoding == "deflate":
            plain = zlib.decompressobj().decompress(body, MAX_BODY_BYTES + 1)
        elif encoding == "lz4":
            plain = _lz4(body)
        else:
            raise refusal(NOT_IMPLEMENTED, f"Content-Encoding {encoding!r} is not supported: use zstd, lz4 or gzip")
    except (zstandard.ZstdError, zlib.error, OSError, EOFError, RuntimeError) as error:
        raise refusal(CANNOT_DECOMPRESS, f"The body is not {encoding}: {error}") from error
    if len(plain) > MAX_BODY_BYTES:
        raise refusal(TOO_MANY_BYTES, f"The body is larger than {MAX_BODY_BYTES} bytes: send smaller inserts")
    return plain


def _bounded(stream: io.RawIOBase | gzip.GzipFile | zstandard.ZstdDecompressionReader) -> bytes:
    # A small compressed body may hold a huge one: never read more than the limit and one byte to notice it.
    pieces, size = [], 0
    while size <= MAX_BODY_BYTES:
        piece = stream.read(1 << 20)
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def _lz4(body: bytes) -> bytes:
    try:
        import lz4.frame  # type: ignore[import-untyped] # noqa: PLC0415 - an optional package of clickhouse-connect's
    except ImportError as error:
        raise refusal(
            BAD_ARGUMENTS, "Content-Encoding lz4 needs the Python package `lz4`: install it, or use zstd"
        ) from error
    plain: bytes = lz4.frame.LZ4FrameDecompressor().decompress(body, MAX_BODY_BYTES + 1)
    return plain
