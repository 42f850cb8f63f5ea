"""What a worker says about itself: work in flight, and how late its event loop is.

The client's heartbeats, the polls and all handlers share one loop: code that holds it for longer than a heartbeat puts
the membership at risk, and for longer than the session loses it. So the loop's lag is measured all the time, its worst
value goes to `metrics`, and beyond a limit the log says so at once. Losing points changes nothing that counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from infra.clock import Clock
from infra.errors import BusError
from infra.wire import Publisher
from schemas.telemetry import MetricPoint, Metrics
from schemas.topics import METRICS

log = logging.getLogger(__name__)

TICK_S = 0.1
"""The loop is asked this often whether it is late, seconds."""

REPORT_S = 10.0
"""Points are published this often, seconds."""

ALARM_S = 1.0
"""A loop that is this late has missed a heartbeat, seconds."""


class Vitals:
    """Measures one process and publishes what it finds."""

    def __init__(
        self, publisher: Publisher, clock: Clock, *, stage: str, worker: str, gauges: Callable[[], Mapping[str, float]]
    ) -> None:
        """Build it.

        Args:
            publisher: where points go.
            clock: time; the loop's own.
            stage: begins the names of the points.
            worker: who says so.
            gauges: name with unit -> value now.
        """
        self._publisher = publisher
        self._clock = clock
        self._stage = stage
        self._worker = worker
        self._gauges = gauges
        self._worst_s = 0.0

    async def run(self) -> None:
        """Measure and publish until cancelled."""
        report_at = self._clock.monotonic() + REPORT_S
        while True:
            asked = self._clock.monotonic()
            await self._clock.sleep(TICK_S)
            now = self._clock.monotonic()
            self._note(now - asked - TICK_S)
            if now >= report_at:
                report_at = now + REPORT_S
                await self._report()

    def _note(self, late_s: float) -> None:
        self._worst_s = max(self._worst_s, late_s)
        if late_s >= ALARM_S:
            log.warning(
                "%s: the event loop was held for %.1f s; heartbeats wait that long too. Code that blocks belongs in a "
                "thread (or the machine is overloaded)",
                self._worker,
                late_s,
            )

    async def _report(self) -> None:
        values = {"loop_lag_s": self._worst_s, **self._gauges()}
        self._worst_s = 0.0
        now_ms = self._clock.now_ms()
        points = tuple(
            MetricPoint(name=f"{self._stage}.{name}", value=value, at_ms=now_ms, labels={"worker": self._worker})
            for name, value in values.items()
        )
        try:
            await self._publisher.publish(METRICS, Metrics(run="", service=self._stage, points=points))
        except BusError as error:
            log.warning("%s: %d points not published: %s", self._worker, len(points), error)
