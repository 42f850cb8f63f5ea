"""Stage events on their way to the log: collected for a moment, one record per partition.

Events are for people and dashboards; losing some never changes what is trained on, so an unreachable log drops the
oldest beyond a bound and says how many.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from infra.clock import Clock
from infra.errors import BusError
from infra.wire import Publisher
from schemas.partition import partition_for
from schemas.telemetry import StageEvent, StageEvents
from schemas.topics import EVENTS

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.1
"""Events wait this long for company, in seconds."""

MAX_WAITING = 20_000
"""Most events kept while the log is away; older ones are dropped and counted."""


class EventLog:
    """Collects events of one worker and publishes them in the background."""

    def __init__(self, publisher: Publisher, clock: Clock, worker: str) -> None:
        self._publisher = publisher
        self._clock = clock
        self._worker = worker
        self._waiting: deque[StageEvent] = deque(maxlen=MAX_WAITING)
        self._dropped = 0

    def add(self, event: StageEvent) -> None:
        """Take an event; never blocks."""
        if len(self._waiting) == MAX_WAITING:
            self._dropped += 1
        self._waiting.append(event)

    async def run(self) -> None:
        """Publish what was collected, again and again, until cancelled."""
        while True:
            await self._clock.sleep(FLUSH_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Publish what was collected so far; keeps it when the log does not take it."""
        batches: dict[int, list[StageEvent]] = {}
        while self._waiting:
            event = self._waiting.popleft()
            sample = f"{event.run}/{event.group}/{event.sample}"
            batches.setdefault(partition_for(sample, EVENTS.partitions), []).append(event)
        await asyncio.gather(*(self._send(partition, events) for partition, events in batches.items()))
        if self._dropped:
            log.warning("%d events were dropped while the log was away", self._dropped)
            self._dropped = 0

    async def _send(self, partition: int, events: list[StageEvent]) -> None:
        message = StageEvents(worker=self._worker, events=tuple(events))
        try:
            await self._publisher.publish(EVENTS, message, partition=partition)
        except BusError as error:
            log.warning("events not published, kept for later: %s", error)
            for event in events:
                self.add(event)
