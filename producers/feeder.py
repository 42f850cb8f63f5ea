"""Publishes groups as far ahead of the trainer as its credit allows; one active feeder per run.

Each group gets a dense admission number. Its tasks are published and acknowledged, then the cursor is written: a crash
in between publishes at most one group twice, and the arbiter absorbs that. What the trainer stamps on a group
(horizon, temperature, lowest version) comes with the credit at admission. A cancelled run is fed no more. A cancelled
group is fed like any other and ends at once as `cancelled`: only then does the trainer know that its number is done
with, and gives credit for the next.

Rows of a source that is passed again may be chosen by what they achieved (`difficulty.py`). Then the choice is written
into the cursor before its first task, so that a feeder that takes over goes on with the same instance, whatever is
known by then: a number has one group.

A feeder says that it starts; one that reads of a later start stops, whoever is behind it (`FeederReplaced`). What both
published until then are the same groups under the same ids, and the cursor is the maximum.
"""

from __future__ import annotations

import logging

from infra.bus import Bus
from infra.clock import Clock
from infra.control import ControlView
from infra.errors import ConfigError, RollmillError, WaitTimeout
from infra.service import worker_name
from infra.wire import Publisher
from producers.difficulty import Difficulty
from producers.publish import publish_tasks, refuse_other, tasks_of
from producers.source import Instance, TaskSource
from schemas.control import Cancel, Credit, Cursor, FeederStarted, RunManifest
from schemas.topics import CONTROL

log = logging.getLogger(__name__)

SAY_EVERY_S = 30.0
"""A feeder that waits says what it waits for this often, seconds."""

RESUMED_S = 60.0
"""A run that had ended may be resumed by a trainer that starts together with its feeder, seconds."""

MANIFEST_WAIT_S = 300.0
"""Longest wait for the run's manifest, seconds."""


class FeederReplaced(RollmillError):
    """Another feeder feeds the run now."""


class Feeder:
    """Feeds one run from one source."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        run: str,
        source: TaskSource,
        *,
        expected: RunManifest | None = None,
        floor: float | None = None,
    ) -> None:
        """Set up.

        Args:
            bus: the log.
            clock: time.
            run: the run.
            source: where its instances come from.
            expected: what the feeder was told that the run is; another recorded manifest is refused.
            floor: chance of a row that says nothing new, if rows are chosen by difficulty; all are taken unless given.
        """
        self._bus = bus
        self._clock = clock
        self._run = run
        self._source = source
        self._expected = expected
        self._floor = floor
        self._started_at = -1
        self._publisher = Publisher(bus, clock, "feeder")
        self._control = ControlView(bus, clock)

    async def run(self) -> int:
        """Feed until the source ends, the trainer closes the run or it is cancelled; return the groups admitted."""
        async with self._control.following():
            return await self._feed()

    async def _feed(self) -> int:
        manifest = await self._manifest()
        if self._expected is not None:
            refuse_other(manifest, self._expected)
        await self._take_over()
        rows = self._difficulty(manifest)
        cursor = self._control.get(f"cursor/{self._run}", Cursor) or Cursor(run=self._run, admitted=0)
        admitted, first = cursor.admitted, max(cursor.admitted, cursor.passed)
        for passed, instance in enumerate(self._source.instances(first), first):
            credit = await self._credit_for(admitted)
            if isinstance(credit, Cancel):
                cause = credit.cause
                log.info("run %s is cancelled (%s): it is fed no more, %d groups admitted", self._run, cause, admitted)
                return admitted
            if credit.closed:
                log.info("run %s is closed by its trainer: %d groups admitted", self._run, admitted)
                return admitted
            if rows is not None and not (cursor.taking and passed == first):
                if not await rows.takes(instance, credit.decided):
                    continue
                await self._publisher.publish(CONTROL, self._cursor(admitted, passed, taking=True))
            await self._admit(manifest, instance, admitted, credit)
            admitted += 1
            await self._publisher.publish(CONTROL, self._cursor(admitted, passed + 1))
        log.info("the source of run %s ended: %d groups admitted", self._run, admitted)
        return admitted

    async def _take_over(self) -> None:
        known = self._control.get(f"feeder/{self._run}", FeederStarted)
        if known is not None and known.source != self._source.name:
            raise ConfigError(
                f"run {self._run!r} is fed from source {known.source!r}, this feeder reads {self._source.name!r}: its "
                f"group numbers would go on in the middle of another source. Start a new run, or give the source its "
                f"old name (`name` in [tasks]) if it is the same"
            )
        started = FeederStarted(run=self._run, feeder=worker_name("feeder"), source=self._source.name)
        self._started_at = (await self._publisher.publish(CONTROL, started)).offset

    def _refuse_if_replaced(self) -> None:
        key = f"feeder/{self._run}"
        later = self._control.get(key, FeederStarted)
        if later is not None and self._control.offset(key) > self._started_at:
            raise FeederReplaced(
                f"another feeder ({later.feeder}) has started on run {self._run!r}, at offset "
                f"{self._control.offset(key)} of `control`; this one began at {self._started_at} and ends here. One "
                f"feeder per run is enough: what both published are the same groups, and each counts once"
            )

    async def _admit(self, manifest: RunManifest, instance: Instance, number: int, credit: Credit) -> None:
        now_ms = self._clock.now_ms()
        tasks = tasks_of(manifest, self._source.name, instance, now_ms=now_ms, admission=number, credit=credit)
        await publish_tasks(self._publisher, tasks)

    def _cursor(self, admitted: int, passed: int, *, taking: bool = False) -> Cursor:
        """Return how far the feeder is; how far in the source only where some of it was skipped."""
        skipped = passed != admitted or taking
        return Cursor(run=self._run, admitted=admitted, passed=passed if skipped else 0, taking=taking)

    def _difficulty(self, manifest: RunManifest) -> Difficulty | None:
        if self._floor is None:
            return None
        return Difficulty(self._bus, self._clock, self._run, manifest.seed, self._floor)

    async def _credit_for(self, number: int) -> Credit | Cancel:
        """Return the credit once it covers a group number, or closes the run; waits as long as the trainer does.

        A cancel of the run ends the wait. That the run had ended before this feeder began is not believed at once.
        """
        waited_from = said_at = self._clock.monotonic()
        while (cancel := self._control.get(f"cancel/{self._run}", Cancel)) is None:
            self._refuse_if_replaced()
            credit = self._control.get(f"credit/{self._run}", Credit)
            if credit is not None and self._decides(credit, number, waited_from):
                return credit
            await self._control.changed(said_at + SAY_EVERY_S - self._clock.monotonic())
            now = self._clock.monotonic()
            if now - said_at >= SAY_EVERY_S:
                said_at, waited_s = now, now - waited_from
                has = _told(credit)
                log.info("run %s: group %d waits %.0f s for credit (%s)", self._run, number, waited_s, has)
        return cancel

    def _decides(self, credit: Credit, number: int, since: float) -> bool:
        """Tell whether a credit covers a group number, or ends the run."""
        if not credit.closed:
            return number < credit.admit_up_to
        before_us = self._control.offset(f"credit/{self._run}") < self._started_at
        return not before_us or self._clock.monotonic() - since >= RESUMED_S

    async def _manifest(self) -> RunManifest:
        until = self._clock.monotonic() + MANIFEST_WAIT_S
        while True:
            manifest = self._control.get(f"run/{self._run}", RunManifest)
            if manifest is not None:
                return manifest
            if self._clock.monotonic() > until:
                raise WaitTimeout(
                    f"waited {MANIFEST_WAIT_S:g} s for the manifest of run {self._run!r}; start its trainer"
                )
            await self._control.changed(SAY_EVERY_S)


def _told(credit: Credit | None) -> str:
    if credit is None:
        return "its trainer has given none yet"
    return "the run had ended; a trainer may resume it" if credit.closed else f"has {credit.admit_up_to}"
