"""Brings the weights that a run's trainer announced into an engine: pause, load, version, resume.

Follows `policy/<run>` on the control topic; a record of a lower epoch or version than the one loaded is ignored, so
an old trainer that wakes up changes nothing. A load that fails leaves the engine with the weights it has and is tried
again; the pause is ended either way.
"""

from __future__ import annotations

import logging
from pathlib import Path

from infra.clock import Clock
from infra.control import ControlView
from infra.errors import BusError
from infra.inference.base import PolicyClient, PolicyError
from infra.wire import Publisher
from schemas.control import PolicyVersion
from schemas.telemetry import MetricPoint, Metrics
from schemas.topics import METRICS

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""Without news the engine's version is compared again this often, seconds: an engine may have restarted."""

AGAIN_S = 1.0
"""Pause before a failed load is tried again, seconds."""


class WeightSync:
    """Keeps one engine at the version that one run announced last."""

    def __init__(
        self, control: ControlView, client: PolicyClient, clock: Clock, publisher: Publisher, *, run: str
    ) -> None:
        self._control = control
        self._client = client
        self._clock = clock
        self._publisher = publisher
        self._run = run
        self._loaded: tuple[int, str] | None = None

    async def run(self) -> None:
        """Load what is announced, until cancelled."""
        while True:
            wanted = self._control.get(f"policy/{self._run}", PolicyVersion)
            try:
                if wanted is not None and await self._behind(wanted):
                    await self._load(wanted)
            except PolicyError as error:
                log.warning("policy version %s not loaded, tried again: %s", wanted and wanted.version, error)
                await self._clock.sleep(AGAIN_S)
                continue
            await self._control.changed(LOOK_EVERY_S)

    async def _behind(self, wanted: PolicyVersion) -> bool:
        """Tell whether the engine may serve other weights.

        The number alone does not prove it: an engine that was started with another model calls that its version 0.
        """
        if self._loaded != (wanted.version, wanted.digest):
            return True
        return (await self._client.info()).version != wanted.version

    async def _load(self, wanted: PolicyVersion) -> None:
        began = self._clock.monotonic()
        try:
            # Inside: a pause whose answer was lost may hold, and must be ended too.
            await self._client.pause("keep")
            await self._client.load(Path(wanted.directory), wanted.version)
        finally:
            await self._client.resume()
        self._loaded = (wanted.version, wanted.digest)
        took_s = self._clock.monotonic() - began
        log.info("policy serves version %d of run %s after %.2f s", wanted.version, self._run, took_s)
        point = MetricPoint(name="policy.handover_s", value=took_s, at_ms=self._clock.now_ms(), step=wanted.version)
        try:
            await self._publisher.publish(METRICS, Metrics(run=self._run, service="policy", points=(point,)))
        except BusError as error:
            log.warning("metric %s not published: %s", point.name, error)
