"""Events as tests write them."""

from __future__ import annotations

import pytest

from schemas.telemetry import EventKind, StageEvent

NOW_MS = 1_700_000_000_000


@pytest.fixture
def event():
    """Return a maker of events: kind, seconds from now, and what differs from sample 0 of a run in RUN."""

    def make(kind: EventKind, at_s: float, **changes: object) -> StageEvent:
        fields = {"run": "r", "group": "g", "sample": 0, "attempt": 0, "stage": "run", **changes}
        return StageEvent(kind=kind, at_ms=NOW_MS + int(at_s * 1000), **fields)

    return make
