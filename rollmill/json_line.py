"""The one JSON object that `--json` prints last on standard output: of a result, or of an error.

It is valid JSON whatever is in it, and ASCII, so that any terminal, pipe and parser takes it. Light: the command line
imports it before it knows which command is called.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_line(value: Any) -> str:
    """Return a value as one line of JSON."""
    return json.dumps(_jsonable(value), allow_nan=False)


def error_line(error: BaseException, message: str, exit_code: int) -> str:
    """Return the line of an error: programs tell it from a result by its one key."""
    return json_line({"error": {"kind": type(error).__name__, "message": message, "exit_code": exit_code}})


def _jsonable(value: Any) -> Any:
    """Return a value as JSON can hold it: NaN and infinity become null, as ClickHouse's own JSON formats write them."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key if isinstance(key, str) else str(key): _jsonable(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_jsonable(item) for item in value]
        case bytes():
            return value.decode(errors="backslashreplace")
        case _:
            return str(value)
