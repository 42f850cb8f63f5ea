"""Finds task families: the entry points of group `rollmill.handlers`, ours and third parties' alike.

A handler is imported when it is first asked for, so that a family whose packages are missing stops nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from infra.envhost.environment import Environment
from infra.errors import Failure, boundary
from schemas.outcome import Boundary, FailureKind
from stages.handlers.base import Handler

GROUP = "rollmill.handlers"
"""Entry point group that third parties register their families in."""


def families() -> list[str]:
    """Return the names of all installed families, sorted."""
    return sorted(_found())


@cache
def handler(family: str) -> Handler:
    """Return the handler of a family.

    Raises:
        Failure: the family is unknown (the known ones are named) or its package cannot be imported.
    """
    entry = _found().get(family)
    if entry is None:
        known = ", ".join(families())
        raise Failure(FailureKind.INVALID_TASK, Boundary.TASK, f"unknown family {family!r}; known: {known}")
    with boundary(Boundary.TASK, FailureKind.HANDLER):
        try:
            kind = entry.load()
        except (ImportError, AttributeError) as error:
            cause = f"family {family!r} ({entry.value}) cannot be imported: {error}"
            raise Failure(FailureKind.INVALID_TASK, Boundary.TASK, cause) from error
        found: Handler = kind()
    return found


def environment(family: str, payload: Mapping[str, Any], seed: int) -> Environment:
    """Build an environment of a family: the factory that an environment host is given."""
    return handler(family).environment(payload, seed)


def _found() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
