"""Errors of the local server in ClickHouse's own terms: a code, a name, an HTTP status.

The table of statuses follows the real server's. This file does not know where an error came from.
"""

from __future__ import annotations

import re

UNKNOWN_CODE = 1002
"""ClickHouse's UNKNOWN_EXCEPTION, for an engine message without a code."""

# ClickHouse's numbers of the errors that this server raises itself.
BAD_ARGUMENTS = 36
NOT_IMPLEMENTED = 48
SYNTAX_ERROR = 62
READONLY = 164
CANNOT_DECOMPRESS = 271
TOO_MANY_BYTES = 307
SESSION_NOT_FOUND = 372
SESSION_IS_LOCKED = 373
INVALID_SESSION_TIMEOUT = 374
AUTHENTICATION_FAILED = 516

_NAMES = {
    BAD_ARGUMENTS: "BAD_ARGUMENTS",
    NOT_IMPLEMENTED: "NOT_IMPLEMENTED",
    SYNTAX_ERROR: "SYNTAX_ERROR",
    READONLY: "READONLY",
    CANNOT_DECOMPRESS: "CANNOT_DECOMPRESS",
    TOO_MANY_BYTES: "TOO_MANY_BYTES",
    SESSION_NOT_FOUND: "SESSION_NOT_FOUND",
    SESSION_IS_LOCKED: "SESSION_IS_LOCKED",
    INVALID_SESSION_TIMEOUT: "INVALID_SESSION_TIMEOUT",
    AUTHENTICATION_FAILED: "AUTHENTICATION_FAILED",
    UNKNOWN_CODE: "UNKNOWN_EXCEPTION",
}

_BAD_REQUEST = frozenset({6, 25, 26, 27, 36, 38, 41, 43, 49, 53, 62, 69, 70, 72, 108, 117, 130, 131, 456, 457})
_NOT_FOUND = frozenset({16, 46, 47, 50, 56, 60, 63, 73, 78, 81, 115, 336, 372})
_FORBIDDEN = frozenset({192, 193, 512, 516})
_OTHER_STATUS = {48: 501, 159: 408, 194: 401, 202: 503, 209: 503, 307: 413, 396: 413, 439: 503}

_CODE = re.compile(r"Code: (\d{1,6})\b")


class ServerError(Exception):
    """A request that the local server answers with an error.

    `code` is ClickHouse's error code; `text` is the whole message as the real server would write it.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text

    @property
    def status(self) -> int:
        """The HTTP status that the real server sends with this code."""
        if self.code in _BAD_REQUEST:
            return 400
        if self.code in _NOT_FOUND:
            return 404
        if self.code in _FORBIDDEN:
            return 403
        return _OTHER_STATUS.get(self.code, 500)


def refusal(code: int, text: str) -> ServerError:
    """Return an error of this server's own, worded as ClickHouse words its errors."""
    return ServerError(code, f"Code: {code}. DB::Exception: {text} ({_NAMES[code]})")


def from_engine(error: BaseException) -> ServerError:
    """Return the engine's error with its code read from the message."""
    text = str(error)
    found = _CODE.search(text)
    if found is None:
        return refusal(UNKNOWN_CODE, text)
    # The engine's Python wrapper puts its own words in front; clients look for the code first.
    return ServerError(int(found.group(1)), text[found.start() :])
