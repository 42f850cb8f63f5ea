"""How sides are compared: in turns, several times, by their medians.

A machine is never as idle in one minute as in the next. So each round measures every side once, and every other round
in the opposite order: what disturbs the machine, or warms it, meets all sides alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

Side = Callable[[int], Awaitable[float]]
"""Measures one side in a round, given the round's number from 0; returns the figure."""


@dataclass(frozen=True)
class Series:
    """The figures of one side, a round each."""

    values: tuple[float, ...]
    """In the order of the rounds."""

    @property
    def median(self) -> float:
        """The figure of the side."""
        return statistics.median(self.values)

    def spread(self) -> dict[str, Any]:
        """Return the extremes and every round's figure."""
        return {"min": min(self.values), "max": max(self.values), "rounds": list(self.values)}


async def interleaved(sides: Mapping[str, Side], *, rounds: int) -> dict[str, Series]:
    """Measure every side in every round, in turns, and return the figures of each."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            figures[name].append(await sides[name](number))
    return {name: Series(tuple(values)) for name, values in figures.items()}
