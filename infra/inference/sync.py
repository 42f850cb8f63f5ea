"""Brings the weights that a run's trainer announced into an engine: pause, load, version, resume.

Follows `policy/<run>` on the control topic; a record of a lower epoch or version than the one loaded is ignored, so
an old trainer that wakes up changes nothing. A load that fails leaves the engine with the weights it has and is tried
again; the pause is ended either way.

Loaded weights are asked for their canary (`canary.py`): in the pause where the engine answers in one (ours does), right
behind it where not. An engine that does not have what it loaded is given back what it had; if it is so again, the
version is put into quarantine, `quarantine/<run>`: no engine loads it any more, and from then on RUN takes no token of
it. Behind a pause an engine may have sampled with it until it was asked; what had ended by then is taken.

Several engines of one run are `sync_pool.py`. An engine serves one run. Its weights carry their run's name, so a second
synchronisation finds that the first one's run is still training and leaves the engine alone, unless it is told to take
it; the first one then finds that out and ends.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from pathlib import Path

from infra.clock import Clock
from infra.control import ControlView
from infra.errors import BusError, RollmillError
from infra.inference import canary
from infra.inference.base import (
    UNKNOWN,
    BadReply,
    ContextOverflow,
    PolicyClient,
    PolicyError,
    PolicyOverloaded,
    PolicyRefused,
    PolicyTooSlow,
    PolicyUnreachable,
    Weights,
    WrongWeights,
)
from infra.inference.quarantine import announced, quarantined
from infra.wire import Publisher
from schemas.control import Canary, Cancel, Credit, PolicyVersion, Quarantine
from schemas.telemetry import MetricPoint, Metrics
from schemas.topics import CONTROL, METRICS
from schemas.transcript import LogProbs

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""Without news the engine's version is compared again this often, seconds: an engine may have restarted."""

ASKS = 3
"""An engine that is busy or away is asked for its canary so often, before what it had is put back."""

AGAIN_S = 1.0
"""Pause before a failed load is tried again, seconds."""


class EngineTaken(RollmillError):
    """The engine is another run's.

    Attributes:
        run: whose.
    """

    def __init__(self, reason: str, run: str) -> None:
        super().__init__(reason)
        self.run = run


class WeightSync:
    """Keeps one engine at the version that one run announced last."""

    def __init__(
        self,
        control: ControlView,
        client: PolicyClient,
        clock: Clock,
        publisher: Publisher,
        *,
        run: str,
        take: bool = False,
        turn: asyncio.Lock | None = None,
        address: str = "",
        limit_nats: float = canary.LIMIT_NATS,
    ) -> None:
        """Build it.

        Args:
            control: what is announced; somebody follows it.
            client: the engine.
            clock: time.
            publisher: for metrics.
            run: the run.
            take: take the engine from a run that has not ended.
            turn: held during a load, so that of several engines one is loaded at a time; none: all may be.
            address: where the engine is, for people.
            limit_nats: from this distance on it has other weights than it loaded; 0: it is not asked.
        """
        self._control = control
        self._client = client
        self._clock = clock
        self._publisher = publisher
        self._run = run
        self._take = take
        self._turn = turn
        self._address = address
        self._limit_nats = limit_nats
        self._loaded: tuple[int, str] | None = None
        self._good: PolicyVersion | None = None
        """What the engine had last, and was not wrong about."""
        self._doubted: tuple[int, int] | None = None
        """Epoch and number of a version that it had loaded and did not have."""

    async def run(self) -> None:
        """Load what is announced, until cancelled.

        Raises:
            EngineTaken: the engine is that of a run that has not ended, or another run took it.
        """
        if announced(self._control, self._run) is None:
            log.info("no trainer of run %s has announced a version yet: the engine is left as it is", self._run)
        while True:
            wanted = self._wanted()
            try:
                if wanted is not None and await self._behind(wanted):
                    async with self._turn or nullcontext():
                        wanted = await self._load_what_is_wanted_now()
            except PolicyError as error:
                log.warning("policy version %s not loaded, tried again: %s", wanted and wanted.version, error)
                await self._clock.sleep(AGAIN_S)
                continue
            # A version that was announced during the load woke nobody.
            if self._wanted() == wanted:
                await self._control.changed(LOOK_EVERY_S)

    def _wanted(self) -> PolicyVersion | None:
        """Return the version that was announced last; if that is in quarantine, the one before, if there was one."""
        return self._good if quarantined(self._control, self._run) else announced(self._control, self._run)

    async def _load_what_is_wanted_now(self) -> PolicyVersion | None:
        """Load it if it still must be; the turn may have been waited for. Return what was wanted."""
        wanted = self._wanted()
        if wanted is not None and (self._turn is None or await self._behind(wanted)):
            await self._load(wanted)
        return wanted

    async def _behind(self, wanted: PolicyVersion) -> bool:
        """Tell whether the engine may serve other weights.

        The number alone does not prove it: an engine that was started with another model calls that its version 0.
        """
        found = (await self._client.info()).weights
        if found.run not in {"", self._run}:
            self._require_right_to(found)
        return self._loaded != (wanted.version, wanted.digest) or found != Weights(wanted.version, self._run)

    def _require_right_to(self, found: Weights) -> None:
        """Raise EngineTaken if the run whose weights are in the engine needs it."""
        has = f"the engine has version {found.version} of run {found.run}"
        if self._loaded is not None:
            cause = f"run {self._run} had this engine, and now {has}: whoever follows that run took it"
            raise EngineTaken(cause, found.run)
        if not (self._take or is_over(self._control, found.run)):
            raise EngineTaken(
                f"{has}, whose trainer has not closed it: wait for its end, or cancel it, or take its engine by "
                "--take. Runs that train at the same time need engines of their own: `rollmill backends add NAME URL "
                "--run RUN`",
                found.run,
            )

    async def _load(self, wanted: PolicyVersion) -> None:
        began = self._clock.monotonic()
        try:
            # Inside: a pause whose answer was lost may hold, and must be ended too.
            await self._client.pause("keep")
            await self._client.load(Path(wanted.directory), wanted.version, self._run)
        except BaseException:
            await self._end_pause()
            raise
        try:
            apart = await self._proven(wanted)
        except PolicyError as error:
            await self._put_back()
            if isinstance(error, WrongWeights):
                await self._doubt(wanted, str(error))
            raise
        except BaseException:
            await self._end_pause()
            raise
        self._good, self._loaded, self._doubted = wanted, (wanted.version, wanted.digest), None
        took_s = self._clock.monotonic() - began
        log.info("policy serves version %d of run %s after %.2f s", wanted.version, self._run, took_s)
        await self._tell(wanted.version, {"policy.handover_s": took_s, "policy.canary_nats": apart})

    async def _proven(self, wanted: PolicyVersion) -> float | None:
        """Let the engine sample on if it has what it loaded, or ask it right then; return the canary's distance, nats.

        Raises:
            WrongWeights: it has other weights; it may still be paused.
        """
        in_pause = (await self._client.info()).scores_paused
        apart = await self._ask(wanted) if in_pause else None
        await self._client.resume()
        return apart if in_pause else await self._ask(wanted)

    async def _ask(self, wanted: PolicyVersion) -> float | None:
        """Return how far the engine is from what was announced; None if that is not to be known."""
        if wanted.canary is None or not self._limit_nats:
            return None
        try:
            apart = canary.apart(wanted.canary, await self._scored(wanted.canary))
        except ContextOverflow as error:  # a setting of the engine's, which says nothing of its weights
            log.warning("the canary of version %d cannot be asked for: %s", wanted.version, error)
            return None
        except (BadReply, PolicyRefused) as error:  # what is no number; ids that this model has not
            raise WrongWeights(f"it has no answer to the canary of version {wanted.version}: {error}") from error
        if not apart < self._limit_nats:
            raise WrongWeights(
                f"what it says to the canary of version {wanted.version} is {apart:.3g} nats from the trainer's in the "
                f"mean, and up to {self._limit_nats:g} is rounding: {wanted.directory} holds other weights than were "
                "announced, or the engine did not load them whole"
            )
        return apart

    async def _scored(self, asked: Canary) -> LogProbs:
        """Return what the engine says to a canary; one that is busy or away for a moment is asked again."""
        for _ in range(ASKS - 1):
            try:
                return await self._client.score(asked.prompt)
            except (PolicyUnreachable, PolicyOverloaded, PolicyTooSlow) as error:
                log.info("the canary is asked for again: %s", error)
                await self._clock.sleep(AGAIN_S)
        return await self._client.score(asked.prompt)

    async def _put_back(self) -> None:
        """Give the engine what it had, or, where that is gone, say that what it has is no version."""
        try:
            await self._client.pause("keep")
            # First: whatever fails from here on, nothing that is sampled counts as of that version.
            await self._client.label(UNKNOWN)
            if self._good is not None:
                await self._client.load(Path(self._good.directory), self._good.version, self._run)
        except PolicyRefused as error:
            log.warning("what it had before cannot be put back: %s", error)
        finally:
            await self._end_pause()

    async def _doubt(self, wanted: PolicyVersion, cause: str) -> None:
        """Count against a version; the second time in a row it is put into quarantine."""
        place = (wanted.epoch, wanted.version)
        if self._doubted != place:
            self._doubted = place
            return
        log.error("version %d of run %s is put into quarantine: %s", wanted.version, self._run, cause)
        record = Quarantine(
            run=self._run,
            epoch=wanted.epoch,
            version=wanted.version,
            address=self._address,
            cause=cause,
            at_ms=self._clock.now_ms(),
        )
        try:
            await self._publisher.publish(CONTROL, record)
        except BusError as error:
            log.warning("the quarantine of version %d is not published yet: %s", wanted.version, error)

    async def _tell(self, version: int, values: dict[str, float | None]) -> None:
        """Send metrics; they are not worth a hand-over."""
        now_ms = self._clock.now_ms()
        points = tuple(
            MetricPoint(name=name, value=value, at_ms=now_ms, step=version)
            for name, value in values.items()
            if value is not None
        )
        try:
            await self._publisher.publish(METRICS, Metrics(run=self._run, service="policy", points=points))
        except BusError as error:
            log.warning("metrics of version %d not published: %s", version, error)

    async def _end_pause(self) -> None:
        """Let the engine sample on after a load that did not end well; what went wrong is said by its own error."""
        try:
            await self._client.resume()
        except PolicyError as error:
            log.warning("the engine stays paused until its lease or the next load ends that: %s", error)


def is_over(control: ControlView, run: str) -> bool:
    """Tell whether a run needs its engines no longer: its trainer has closed it, or it was cancelled."""
    credit = control.get(f"credit/{run}", Credit)
    return (credit is not None and credit.closed) or control.get(f"cancel/{run}", Cancel) is not None
