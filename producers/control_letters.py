"""Records of `control` that are none: each becomes one letter in `dead`, written by the reaper alone.

Every service reads `control`, and reads it again from its start whenever it begins; were each to bury what it cannot
use, `dead` would hold a copy for every start. The reaper runs wherever samples are admitted, and tidies up there anyway
(`reaper.py`). A bad record stays in `control` until its key is written again, so before the first letter is written the
letters that lie in `dead` already are read. Two reapers that meet a record in the same moment may both bury it: a
second letter is a second copy of the same bytes and place, and nothing follows from either.

The record itself is left where it lies, and what was known of its key stays known while the log holds it. Nothing is
written over it: it may be good to a service that is newer than this one.
"""

from __future__ import annotations

import logging

from infra.bus import Bus, Record
from infra.clock import Clock
from infra.control import shown
from infra.dead_letter import POISON, SKEW_MS, Death, bury, in_dead

log = logging.getLogger(__name__)


class ControlLetters:
    """Takes what a view of `control` refuses, and buries it."""

    def __init__(self, bus: Bus, clock: Clock, stage: str) -> None:
        """Begin without any.

        Args:
            bus: the log.
            clock: time.
            stage: who gives the records up, as the letters say.
        """
        self._bus = bus
        self._clock = clock
        self._stage = stage
        self._waiting: list[tuple[Record, str]] = []
        self._written: set[int] | None = None
        """Offsets that have their letter; None until one is needed."""

    def take(self, record: Record, reason: str) -> None:
        """Take a record that cannot be used, and why."""
        self._waiting.append((record, reason))

    async def write(self) -> int:
        """Write the letters of what was taken and return their number.

        Raises:
            infra.errors.BusError: the log is away.
        """
        number = 0
        while self._waiting:
            record, reason = self._waiting[0]
            if self._written is None:
                self._written = await self._in_dead(record)
            if record.offset not in self._written:
                where = f"`control` offset {record.offset} under key {shown(record.key)}"
                log.warning("%s goes to dead, nobody can use it: %s", where, reason)
                await bury(self._bus, self._clock, record, Death(stage=self._stage, cause=reason))
                self._written.add(record.offset)
                number += 1
            self._waiting.pop(0)
        return number

    async def _in_dead(self, first: Record) -> set[int]:
        # No letter is older than its record; a record of the future was stamped by a clock that says nothing.
        now_ms = self._clock.now_ms()
        since_ms = first.timestamp_ms - SKEW_MS if first.timestamp_ms <= now_ms else 0
        return await in_dead(self._bus, self._clock, first.tp, since_ms, POISON)
