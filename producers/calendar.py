"""Keys by the moment when something is to be done about them. Pure.

A moment is kept to the second: what is popped may be up to a second early, so whoever needs it exact looks again and
puts the key back. In exchange a key costs one place in a table and can be taken out again, where a heap would hold it
to the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

SECOND_MS = 1000


class Calendar(Generic[K]):
    """Keys, each at any number of moments in milliseconds since the epoch."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[K, None]] = {}
        self._order: list[int] = []
        """A heap of the seconds, among them some that are empty by now."""

    def put(self, key: K, at_ms: int) -> None:
        """Note a key; a second time in the same second changes nothing."""
        second = at_ms // SECOND_MS
        if second not in self._seconds:
            self._seconds[second] = {}
            heapq.heappush(self._order, second)
        self._seconds[second][key] = None

    def discard(self, key: K, at_ms: int) -> None:
        """Strike a key off, if it is noted for that second."""
        self._seconds.get(at_ms // SECOND_MS, {}).pop(key, None)

    def pop(self, until_ms: int) -> list[K]:
        """Take out all keys up to the end of a moment's second."""
        found: list[K] = []
        while self._order and self._order[0] <= until_ms // SECOND_MS:
            found.extend(self._seconds.pop(heapq.heappop(self._order)))
        return found
