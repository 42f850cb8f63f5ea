"""What is withdrawn now, followed on `control`, and whoever has to act on it at once.

`watch` ends the work of one asyncio task when its sample is withdrawn; `tell` calls back after every batch of records
that withdrew something. Nothing is reported before `control` has been read to its end, so no service works on what it
could have known to be withdrawn. This file does not know what is done about a withdrawn sample.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from infra.bus import Bus, Record
from infra.clock import Clock
from infra.control import ControlView, pass_over
from infra.errors import ServiceError
from infra.side_by_side import first_error
from schemas.cancels import Cancels
from schemas.control import Cancel
from schemas.messages import SampleId

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Pause before `control` is read anew after its reader broke, seconds."""

PREFIX = "cancel/"
"""Keys of `control` that are withdrawals begin with this; the target follows."""


class Watch:
    """Cancels the asyncio task that entered it once its sample is withdrawn; any other cancellation passes through.

    Attributes:
        cancel: the withdrawal; None as long as there is none. Set on entry if the sample is withdrawn already.
    """

    def __init__(self, cancellation: Cancellation, sample: SampleId) -> None:
        self.cancel: Cancel | None = None
        self.sample = sample
        self._cancellation = cancellation
        self._task: asyncio.Task[object] | None = None
        self._before = 0
        self._fired = False

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None, "entered by a task"
        self._before = self._task.cancelling()
        self.cancel = self._cancellation.of(self.sample)
        self._cancellation.watches.add(self)
        return self

    def fire(self, cancel: Cancel) -> None:
        """End the work under the watch."""
        if self.cancel is None and self._task is not None:
            self.cancel, self._fired = cancel, True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._cancellation.watches.discard(self)
        if not self._fired or self._task is None:
            return False
        # As `asyncio.timeout` does it: a stop or a rebalance that cancels the task as well keeps its say.
        ours_alone = self._task.uncancel() <= self._before
        return ours_alone and kind is not None and issubclass(kind, asyncio.CancelledError)


class Cancellation:
    """The withdrawals in force, kept up to date while `following` is entered."""

    def __init__(self, bus: Bus, clock: Clock, *, refused: Callable[[Record, str], None] = pass_over) -> None:
        """Build one that nothing is known to.

        Args:
            bus: the log.
            clock: time.
            refused: called with each record of `control` that cannot be used, and why.
        """
        self.cancels = Cancels()
        self.changes = 0
        """Grows whenever something was withdrawn: whoever looks now and then compares it."""
        self.watches: set[Watch] = set()
        self._bus = bus
        self._clock = clock
        self._told: list[Callable[[], object]] = []
        self._refused = refused
        self._view = ControlView(bus, clock)

    def of(self, sample: SampleId) -> Cancel | None:
        """Return the withdrawal that covers a sample."""
        return self.cancels.of(sample.run, sample.group, sample.sample)

    def watch(self, sample: SampleId) -> Watch:
        """Return a block that is left at once when the sample is withdrawn."""
        return Watch(self, sample)

    def tell(self, callback: Callable[[], object]) -> None:
        """Have a function called whenever something was withdrawn."""
        self._told.append(callback)

    @property
    def control(self) -> ControlView:
        """Everything that `control` says, for whoever needs more of it than withdrawals."""
        return self._view

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Read `control` to its end, and follow it while the block runs; a reader that breaks ends the block."""
        # Read aside: on a second time the withdrawals known so far stay in force until all have been read again.
        fresh = Cancels()

        def take(keys: list[str]) -> None:
            withdrawn = [key.removeprefix(PREFIX) for key in keys if key.startswith(PREFIX)]
            for target in withdrawn:
                fresh.put(target, view.get(PREFIX + target, Cancel))
            if self.cancels is fresh and any(fresh.get(target) for target in withdrawn):
                self._act()

        view = ControlView(self._bus, self._clock, told=take, refused=self._refused)
        async with view.following():
            self.cancels, self._view = fresh, view
            self._act()
            yield

    @asynccontextmanager
    async def following_on(self) -> AsyncIterator[None]:
        """The same for a service that must outlive an outage of the log: a reader that breaks later is begun anew.

        While nothing can be read nothing can be withdrawn either; what was withdrawn before stays in force.
        """
        started, ending = asyncio.Event(), asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._follow_on(started, ending))
                await started.wait()
                try:
                    yield
                finally:
                    ending.set()
                    reading.cancel()
        except BaseExceptionGroup as several:
            error = first_error(several)
            raise error from error.__cause__

    async def _follow_on(self, started: asyncio.Event, ending: asyncio.Event) -> None:
        # A reader that breaks in the moment of the end takes the cancellation's place: hence the event.
        while not ending.is_set():
            try:
                async with self.following():
                    started.set()
                    await asyncio.Event().wait()
            except ServiceError as error:
                if not started.is_set():
                    raise
                log.warning("`control` is read anew in %g s, nothing new is withdrawn meanwhile: %s", AGAIN_S, error)
            if not ending.is_set():
                await self._clock.sleep(AGAIN_S)

    def _act(self) -> None:
        self.changes += 1
        for watch in list(self.watches):
            cancel = self.of(watch.sample)
            if cancel is not None:
                watch.fire(cancel)
        for callback in self._told:
            callback()
