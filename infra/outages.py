"""For how long stages stood still because a service was away, from what their workers wrote to `control`. Pure.

Several workers write about one service, each what it finds itself; the service was away while any of them found so. Two
services that were away at the same moment cost that moment once. What a worker does not say any more (a record
remembers the last outages only, and one that was killed writes no end) is not added.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemas.control import Breaker


def away_ms(breakers: Iterable[Breaker], since_ms: int, until_ms: int) -> int:
    """Return the time between two moments during which any service was away, in milliseconds."""
    outages = sorted((outage.since_ms, outage.until_ms) for breaker in breakers for outage in breaker.outages)
    total, counted_to = 0, since_ms
    for begin, end in outages:
        begin, end = max(begin, counted_to), min(end, until_ms)  # noqa: PLW2901 - the part that counts
        total += max(0, end - begin)
        counted_to = max(counted_to, end)
    return total
