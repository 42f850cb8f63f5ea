"""How often each thing happened in each stage, over the last minute, five minutes and hour. Pure.

Time is cut into slices of SLICE_MS; a window is the sum of the slices that it touches, so it shows up to one slice more
than its length and never less. Memory: one number per slice, stage and kind that occurred.
"""

from __future__ import annotations

from collections import Counter

from schemas.telemetry import EventKind

WINDOWS_MS = {"1m": 60_000, "5m": 300_000, "1h": 3_600_000}
"""Name of a window -> its length, milliseconds."""

SLICE_MS = 5_000
"""Length of a slice of time, milliseconds."""

LONGEST_MS = max(WINDOWS_MS.values())
"""What is older than this is in no window."""


class Windows:
    """Counts per stage and kind."""

    def __init__(self) -> None:
        self._slices: dict[int, Counter[tuple[str, EventKind]]] = {}

    def add(self, stage: str, kind: EventKind, at_ms: int, now_ms: int) -> None:
        """Count one thing that happened at a time, which is not after now."""
        if at_ms < now_ms - LONGEST_MS:
            return
        at = at_ms // SLICE_MS
        if at not in self._slices:
            self._forget(now_ms)
            self._slices[at] = Counter()
        self._slices[at][stage, kind] += 1

    def counts(self, now_ms: int) -> dict[str, dict[str, dict[str, int]]]:
        """Return stage -> window -> kind -> number."""
        self._forget(now_ms)
        found: dict[str, dict[str, dict[str, int]]] = {}
        for at, counts in self._slices.items():
            for (stage, kind), number in counts.items():
                windows = found.setdefault(stage, {name: {} for name in WINDOWS_MS})
                for name, length_ms in WINDOWS_MS.items():
                    if at >= (now_ms - length_ms) // SLICE_MS:
                        windows[name][kind.value] = windows[name].get(kind.value, 0) + number
        return found

    def _forget(self, now_ms: int) -> None:
        first = (now_ms - LONGEST_MS) // SLICE_MS
        for at in [at for at in self._slices if at < first]:
            del self._slices[at]
