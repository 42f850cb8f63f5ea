"""A task source from nothing: a payload template with a running index, for families that generate their instances.

Endless unless given a count. It does not know what the family makes of the index.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from producers.source import Instance


class GeneratedSource:
    """Instances `{**template, "index": n}` for n = 0, 1, 2, ...

    Attributes:
        name: the source's name in group ids.
    """

    def __init__(
        self, family: str, template: dict[str, Any], *, name: str | None = None, count: int | None = None
    ) -> None:
        """Describe the source.

        Args:
            family: which handler runs the instances.
            template: payload without `index`.
            name: the source's name; the family's unless given.
            count: number of instances; endless if None.
        """
        self.name = name or family
        self._family = family
        self._template = template
        self._count = count

    def instances(self, start: int = 0) -> Iterator[Instance]:
        """Yield instances from the start-th on."""
        for index in itertools.count(start):
            if self._count is not None and index >= self._count:
                return
            yield Instance(0, index, self._family, {**self._template, "index": index})
