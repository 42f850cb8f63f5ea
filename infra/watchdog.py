"""Ends a member that owns partitions with records and is handed none: liveness is progress, not a heartbeat.

A client can lose its way inside (a fetch that never returns, a pause that nobody lifts) and go on with its heartbeats
for days, so its group keeps the partitions with it and nobody else works on them. Nothing here knows why: a restart
begins anew, and the records are still in the log.
"""

from __future__ import annotations

from collections.abc import Mapping

from infra.bus import Bus, TopicPartition
from infra.clock import Clock
from infra.errors import BusError

SILENCE_S = 120.0
"""A member that has room and gets nothing asks so often whether there is anything, seconds; longer than a rebalance."""


class Watchdog:
    """Watches one member."""

    def __init__(self, bus: Bus, clock: Clock, group: str) -> None:
        self._bus = bus
        self._clock = clock
        self._group = group
        self._heard = clock.monotonic()
        self._ends: dict[TopicPartition, int] = {}
        """Where the partitions that were asked for ended at the last look, in the same silence."""

    def heard(self) -> None:
        """Note that records came, or that none were asked for."""
        self._heard = self._clock.monotonic()
        self._ends = {}

    async def look(self, positions: Mapping[TopicPartition, int]) -> None:
        """Ask the log, after a long silence, whether there was anything to hear.

        Args:
            positions: partition that is asked for -> offset of the record that should come next.

        Raises:
            BusError: records lie there that were never handed out.
        """
        if self._clock.monotonic() - self._heard < SILENCE_S:
            return
        self._heard = self._clock.monotonic()
        # What came since the last look may be on its way to us; what lay there then was held back all the time.
        for tp, position in sorted(positions.items()):
            if self._ends.get(tp, 0) > position:
                raise BusError(
                    f"group {self._group}: {tp.topic}, partition {tp.partition} has records up to {self._ends[tp]} and "
                    f"ours is the next one at {position}, but none was handed out for {SILENCE_S:g} s; this member "
                    "starts anew"
                )
        ends = {topic: await self._bus.end_offsets(topic) for topic in {tp.topic for tp in positions}}
        self._ends = {tp: ends[tp.topic].get(tp.partition, 0) for tp in positions}
