"""Which stages stand still because a service is away, for `rollmill status`, from `control`.

A worker that was killed while a service was away writes no end of it: what nobody has said again for a while is left
out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from infra.bus import Bus
from infra.clock import Clock
from infra.control import control_now
from infra.guard import REPORT_S
from schemas.control import Breaker

STALE_S = 6 * REPORT_S
"""What a worker said longer ago than this is not known to be so, seconds; it says it every REPORT_S."""


@dataclass(frozen=True)
class Standstill:
    """One stage that cannot go on."""

    stage: str
    """The stage."""
    service: str
    """What it waits for."""
    address: str
    """Where that should be."""
    since_ms: int
    """When the first of its workers found it away, milliseconds since the epoch."""
    away_s: float
    """That long ago, seconds."""
    workers: int
    """Workers that find so."""
    cause: str
    """What the last of them was told."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for machines."""
        return asdict(self)

    def __str__(self) -> str:
        began = datetime.fromtimestamp(self.since_ms / 1000, UTC)
        return (
            f"{self.stage.upper()} paused: {self.service} at {self.address} away for {self.away_s:.0f} s "
            f"(breaker open since {began:%Y-%m-%d %H:%M:%S} UTC, {self.workers} workers): {self.cause}"
        )


async def standstills(bus: Bus, clock: Clock) -> list[Standstill]:
    """Return what stands still now."""
    return summed_up((await control_now(bus, clock)).all(Breaker), clock.now_ms())


def summed_up(breakers: list[Breaker], now_ms: int) -> list[Standstill]:
    """Return what stands still, one for each stage and service at an address, from what each worker says."""
    found: dict[tuple[str, str, str], list[Breaker]] = {}
    for one in breakers:
        if one.open and now_ms - one.at_ms <= STALE_S * 1000:
            found.setdefault((one.stage, one.service, one.address), []).append(one)
    return [
        Standstill(
            stage=stage,
            service=service,
            address=address,
            since_ms=(since_ms := min(one.since_ms for one in those)),
            away_s=max(0.0, (now_ms - since_ms) / 1000),
            workers=len(those),
            cause=max(those, key=lambda one: one.at_ms).cause,
        )
        for (stage, service, address), those in sorted(found.items())
    ]
