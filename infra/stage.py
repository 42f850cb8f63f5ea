"""A stage of the pipeline: a typed handler between topics, wrapped in the middleware that every stage has.

    Stage(name, sources, sink, handle)    handle: In -> Done[Out] | None

Wiring a handler to a topic that carries another type is a type error. A `Member` is one member of the stage's consumer
group; any number of them share the work. This file knows no particular stage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec

from infra.bus import Bus, Record, TopicPartition
from infra.cancellation import Cancellation
from infra.clock import Clock
from infra.errors import ConfigError, Failure, TooLarge
from infra.events import EventLog
from infra.isolation import Alone, isolation
from infra.middleware import Call, Job, Middleware, Output, Result, Settle, compose
from infra.middleware.cancel import cancel
from infra.middleware.deadline import budget, start_by
from infra.middleware.events import dead_event, events
from infra.middleware.retry import Repeat, retry, start_again
from infra.reading import read_between
from infra.shared_timer import never_still
from infra.side_by_side import alongside
from infra.vitals import Vitals
from infra.wire import Packed, Publisher, first_failed_of
from infra.worker import Limits, Worker, always
from schemas.message import Message
from schemas.outcome import Boundary, FailureKind
from schemas.telemetry import EventKind
from schemas.topics import Topic

log = logging.getLogger(__name__)

In = TypeVar("In", bound=Message)
Out = TypeVar("Out", bound=Message)


class Done(msgspec.Struct, Generic[Out], frozen=True):
    """What a handler made of its input."""

    message: Out
    """Goes to the stage's sink."""
    settle: Settle | None = None
    """Called once the message is acknowledged, before the input is committed."""


@dataclass(frozen=True, kw_only=True)
class Stage(Generic[In, Out]):
    """One stage: what it reads, what it does, where the result goes."""

    name: str
    """Its name and its consumer group: `init`, `run` or `eval`."""
    sources: tuple[Topic[In], ...]
    """Topics it reads."""
    sink: Topic[Out]
    """Topic its results go to."""
    handle: Callable[[In], Awaitable[Done[Out] | None]]
    """Does the work of one message; None means that the result is in the log already. Raises Failure."""
    repeat: Repeat = start_again
    """How its work is made again after a failure of the system."""
    withdraw: Callable[[In], Awaitable[None]] | None = None
    """Gives up what is held for a message whose sample was withdrawn, once that is in the log."""

    def call(self, pack: Callable[[Topic[Out], Out], Awaitable[Packed]], *around: Middleware) -> Call:
        """Return the handler as a call, wrapped; `pack` makes the value of what it returns."""

        async def handled(job: Job) -> Result:
            done = await self.handle(job.received.message)
            if done is None:
                return Result(EventKind.FINISHED)
            # Packed here, under the retry middleware: a result that the log cannot carry fails its own sample. A blob
            # store that is away does not: that is the log being away.
            try:
                packed = await pack(self.sink, done.message)
            except (TooLarge, TypeError) as error:
                raise Failure(FailureKind.HANDLER, Boundary.STAGE, f"{type(error).__name__}: {error}") from error
            first_failed_ms = first_failed_of(job.received.record)
            output = Output(self.sink, done.message, packed)
            return Result(EventKind.FINISHED, output, done.settle, first_failed_ms=first_failed_ms)

        return compose(handled, *around)


class Outages(Protocol):
    """The services that a stage needs, as far as they are away; `infra/guard.py` is one."""

    @property
    def longest_s(self) -> float:
        """Most time that one outage adds to a budget, seconds."""
        ...

    def ready(self) -> bool:
        """Tell whether new work may be begun."""
        ...

    def still_s(self) -> float:
        """Return for how long work could not be done so far, seconds; it never shrinks."""
        ...

    async def run(self) -> None:
        """Find out when services are back, until cancelled."""
        ...


class Member:
    """One member of a stage's consumer group."""

    def __init__(
        self,
        stage: Stage[In, Out],
        bus: Bus,
        clock: Clock,
        *,
        worker: str,
        limits: Limits | None = None,
        first: bool = False,
        alone: Alone | None = None,
        outages: Outages | None = None,
        tells: bool = True,
    ) -> None:
        """Build a member.

        Args:
            stage: what it does.
            bus: the log.
            clock: time.
            worker: its name in events, such as `run-3@host`.
            limits: bounds of the worker.
            first: the stage starts tasks, so it is the one that checks `start_by_ms`.
            alone: runs a record in a process of its own; without it suspects run as all others do.
            outages: what the stage needs besides the log; without it nothing is taken to be away.
            tells: says on `events` what happens to each sample; nothing that counts depends on it.
        """
        self._bus = bus
        self._clock = clock
        self._sources = {topic.name: topic for topic in stage.sources}
        publisher = Publisher(bus, clock, worker)
        self._events = EventLog(publisher, clock, worker)
        self._cancellation = Cancellation(bus, clock)
        starts = (start_by(clock),) if first else ()
        withdrawable = cancel(self._cancellation, stage.withdraw)
        retries, limit = retry(clock, stage.repeat), budget(stage.name, outages.still_s if outages else never_still)
        told = (events(self._events, clock),) if tells else ()
        alone_first = isolation(alone, outages.longest_s if outages else 0.0)
        around = (alone_first, *told, withdrawable, *starts, retries, limit)
        self._outages = outages
        self._vitals = Vitals(publisher, clock, stage=stage.name, worker=worker, gauges=self._gauges)
        self._worker = Worker(
            bus=bus,
            clock=clock,
            stage=stage.name,
            sources=stage.sources,
            call=stage.call(publisher.pack, *around),
            publisher=publisher,
            limits=limits or Limits(),
            # Told in any case: a record that became no job is rare, and nothing else names its sample.
            on_dead=lambda record, death: self._events.add(dead_event(record, death, clock.now_ms())),
            ready=outages.ready if outages else always,
        )

    def stop(self) -> None:
        """Ask the member to finish what it can and leave."""
        self._worker.stop()

    async def run(self) -> None:
        """Work until stopped or cancelled; ends with the error of a reader of `control` that breaks."""
        await self._reported(self._worker.run)

    async def run_only(self, tp: TopicPartition, offset: int, *, begun: Callable[[], None] = lambda: None) -> None:
        """Work on one record, in no group; what follows from it is published, and nothing is committed.

        Args:
            tp: where the record lies.
            offset: and at which offset.
            begun: called when the record is taken up; what goes wrong before has nothing to do with it.

        Raises:
            ConfigError: the stage does not read that topic, or the record is not in the log.
            BusError: the log is away.
        """
        if tp.topic not in self._sources:
            raise ConfigError(f"this stage reads {', '.join(self._sources)}, so it cannot work on {tp.topic}")
        async for record in read_between(self._bus, self._clock, {tp: offset}, {tp: offset + 1}):
            await self._reported(partial(self._work_on, record, begun))

    async def _work_on(self, record: Record, begun: Callable[[], None]) -> None:
        begun()
        await self._worker.work_on(record)

    def _gauges(self) -> dict[str, float]:
        return {"in_flight": self._worker.in_flight, "in_flight_bytes": self._worker.in_flight_bytes}

    async def _reported(self, work: Callable[[], Awaitable[None]]) -> None:
        reporting = [asyncio.create_task(self._events.run()), asyncio.create_task(self._vitals.run())]
        for task in reporting:
            task.add_done_callback(_tell_if_broken)
        try:
            async with self._cancellation.following():
                await self._guarded(work)
        finally:
            for task in reporting:
                task.cancel()
            await asyncio.gather(*reporting, return_exceptions=True)
            await self._events.flush()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work while outages are looked after: should that break, nothing would ever be taken again."""
        if self._outages is None:
            await work()
            return
        async with alongside(self._outages.run()):
            await work()


def _tell_if_broken(reporting: asyncio.Task[None]) -> None:
    """Say that a stage reports no more; its work goes on, for what it reports is never needed."""
    if not reporting.cancelled() and (error := reporting.exception()) is not None:
        log.error("a stage reports nothing any more: %s", error, exc_info=error)
