"""What a task source is: instances in a fixed order, so that a run can be continued and repeated.

An instance has a place (`visit`, `row`) in its source; the place and the payload make the group's id. Iterating from
the same place gives the same instances again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Instance:
    """One task instance at one visit: becomes one group."""

    visit: int
    """How many times the source was passed before."""
    row: int
    """Place in the source."""
    family: str
    """Which handler runs it."""
    payload: dict[str, Any]
    """What the family needs."""
    horizon: int | None = None
    """Most turns, when the instance brings its own."""


class TaskSource(Protocol):
    """Instances in a fixed order."""

    name: str
    """The source's name, part of every group id."""

    def instances(self, start: int = 0) -> Iterator[Instance]:
        """Yield instances from the start-th on; may be endless."""
        ...
