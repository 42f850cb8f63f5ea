"""Stage events on their way to the log: collected for a moment, as few records per partition as they fit into.

Events are for people and dashboards; losing some never changes what is trained on, so an unreachable log drops the
oldest beyond a bound and says how many. The events of one sample keep their order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from infra.clock import Clock
from infra.errors import BusError, TooLarge
from infra.wire import Publisher
from schemas.partition import partition_for
from schemas.telemetry import StageEvent, StageEvents
from schemas.topics import EVENTS

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.1
"""Events wait this long for company, in seconds."""

MAX_WAITING = 20_000
"""Most events kept while the log is away; older ones are dropped and counted."""

MAX_PER_RECORD = 200
"""Most events in one record: each may hold the text of an error, and a record has a largest size."""


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
        unsent = await asyncio.gather(*(self._send(partition, events) for partition, events in batches.items()))
        self._put_back([event for events in unsent for event in events])
        if self._dropped:
            log.warning("%d events were dropped while the log was away", self._dropped)
            self._dropped = 0

    async def _send(self, partition: int, events: list[StageEvent]) -> list[StageEvent]:
        """Publish events of one partition and return those that the log did not take."""
        for at in range(0, len(events), MAX_PER_RECORD):
            part = StageEvents(worker=self._worker, events=tuple(events[at : at + MAX_PER_RECORD]))
            try:
                await self._publisher.publish(EVENTS, part, partition=partition)
            except BusError as error:
                log.warning("%d events not published, kept for later: %s", len(events) - at, error)
                return events[at:]
            except TooLarge as error:
                log.warning("%d events dropped: %s", len(part.events), error)
        return []

    def _put_back(self, unsent: list[StageEvent]) -> None:
        """Keep what was not published, before what came meanwhile."""
        if unsent:
            waiting = [*unsent, *self._waiting]
            self._dropped += max(0, len(waiting) - MAX_WAITING)
            self._waiting = deque(waiting[-MAX_WAITING:], maxlen=MAX_WAITING)
