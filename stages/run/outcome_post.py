"""How an episode turned out, said from outside: a user's verdict, a ticket that was closed.

    POST /outcome    {"success": true, "reward": 0.5, "detail": {"ticket": 17}}

At least one of the three. It goes into the rollout's verdict under `outcome`, where the family's grader finds it, so it
is kept as small and as plain as a verdict has to be. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stages.run.api_error import malformed
from stages.run.chat import read_object, require_shallow

OUTCOME_BYTES = 64 * 1024
"""Largest body, bytes: it travels in the rollout and in the trajectory."""

MAX_DEPTH = 16
"""Deepest nesting of `detail`."""

FIELDS = ("success", "reward", "detail")
"""What it may hold."""


def read_outcome(body: bytes) -> dict[str, Any]:
    """Read the body of a post: the fields that were given, `success` in [0, 1]. Raises ApiError."""
    given = {name: value for name, value in read_object(body).items() if value is not None}
    unknown = sorted(given.keys() - set(FIELDS))
    if unknown or not given:
        raise malformed(next(iter(unknown), None), f"an outcome has at least one of {', '.join(FIELDS)}, and no more")
    for name in ("success", "reward"):
        if name in given:
            given[name] = _number(name, given[name])
    if not 0.0 <= given.get("success", 0.0) <= 1.0:
        raise malformed("success", f"success is {given['success']}; it is true, false, or from 0 to 1")
    require_shallow("detail", given.get("detail"), MAX_DEPTH)
    try:
        msgspec.msgpack.encode(given)
    except OverflowError as error:
        raise malformed("detail", f"a number in detail is too large for a record: {error}") from error
    return given


def _number(name: str, value: Any) -> float:
    if not isinstance(value, bool | int | float):
        raise malformed(name, f"{name} is a number, got {str(value)[:80]!r}")
    return float(value)
