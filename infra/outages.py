"""For how long stages stood still because a service was away, from what their workers wrote to `control`. Pure.

Several workers write about one service, each what it finds itself; the service was away while any of them found so. Two
services that were away at the same moment cost that moment once. What a worker does not say any more (a record
remembers the last outages only, and one that was killed writes no end) is not added.

A record may go once nothing depends on its outages: it was silent for so long that it is nobody's present state, and
whatever may still be put off began after its last outage. A worker that lives says it all again in its next record.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemas.control import Breaker
from schemas.topics import HOUR_MS

SILENT_MS = 24 * HOUR_MS
"""A record older than this is nobody's present state, milliseconds: an open breaker is written every few seconds."""


def away_ms(breakers: Iterable[Breaker], since_ms: int, until_ms: int) -> int:
    """Return the time between two moments during which any service was away, in milliseconds."""
    outages = sorted((outage.since_ms, outage.until_ms) for breaker in breakers for outage in breaker.outages)
    total, counted_to = 0, since_ms
    for begin, end in outages:
        begin, end = max(begin, counted_to), min(end, until_ms)  # noqa: PLW2901 - the part that counts
        total += max(0, end - begin)
        counted_to = max(counted_to, end)
    return total


def forgettable(breakers: Iterable[Breaker], needed_ms: int, now_ms: int) -> list[Breaker]:
    """Return the records whose outages put nothing off any more.

    Args:
        breakers: what workers wrote.
        needed_ms: when the oldest of all that may be put off began, milliseconds since the epoch.
        now_ms: the present time.
    """
    return [
        breaker
        for breaker in breakers
        if breaker.at_ms < now_ms - SILENT_MS
        and max((outage.until_ms for outage in breaker.outages), default=0) <= needed_ms
    ]
