"""What a benchmark gives: one JSON object of a fixed shape.

    {"name", "ours", "rival", "unit", "ratio", "detail": {"<rival>": {"ratio", ...}, ...}}

`ratio` is ours / rival, or None where the benchmark has no first rival. The ratio is of medians over rounds; the
rounds themselves and their spread lie in `detail`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.rounds import Series


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of one benchmark."""

    name: str
    """Name in the table."""
    ours: float
    """Our figure: a median over rounds."""
    rival: float
    """The first rival's figure."""
    unit: str
    """What both count."""
    ratio: float | None
    """ours / rival."""
    detail: dict[str, Any] = field(default_factory=dict)
    """Other rivals, spread, and how it was measured."""

    def figure(self, key: str) -> float:
        """Return the figure at a place such as `detail.process_per_job.ratio`.

        Raises:
            KeyError: there is no number at that place.
        """
        found: Any = asdict(self)
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if not isinstance(found, int | float):
            raise KeyError(f"benchmark {self.name} gave no number at {key!r}, but {found!r}")
        return float(found)

    def to_json(self) -> str:
        """Return the object as one line."""
        return json.dumps(asdict(self))


def versus(ours: Series, rival: Series, *, unit: str) -> dict[str, Any]:
    """Return the entry of one rival in `detail`: medians, their ratio, and the spread of both."""
    return {
        "ours": ours.median,
        "rival": rival.median,
        "unit": unit,
        "ratio": ours.median / rival.median,
        "spread": {"ours": ours.spread(), "rival": rival.spread()},
    }
