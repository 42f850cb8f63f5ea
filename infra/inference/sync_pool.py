"""Brings a run's weights into every engine that is registered for it, together or one after another.

Each engine is followed for itself (`sync.py`): one that fails is tried again and holds up no other. An engine that
another run has, and has not given up, is left to that run as long as there are others. One after another costs no
moment in which nobody samples, and lasts as long as all loads together; RUN finds engines of both versions meanwhile
and gives each task to one that suits.
"""

from __future__ import annotations

import asyncio
import logging

from infra.clock import Clock
from infra.control import ControlView
from infra.inference.backends import in_pool
from infra.inference.base import Connect
from infra.inference.canary import LIMIT_NATS
from infra.inference.sync import LOOK_EVERY_S, EngineTaken, WeightSync, is_over
from infra.wire import Publisher
from schemas.control import Backend

log = logging.getLogger(__name__)


class PoolSync:
    """Keeps all engines of one run at the version that it announced last."""

    def __init__(
        self,
        control: ControlView,
        connect: Connect,
        clock: Clock,
        publisher: Publisher,
        *,
        run: str,
        url: str,
        take: bool = False,
        rolling: bool = False,
        limit_nats: float = LIMIT_NATS,
    ) -> None:
        """Build it.

        Args:
            control: what is announced and registered; somebody follows it.
            connect: makes the client of an engine by its address.
            clock: time.
            publisher: for metrics.
            run: the run.
            url: the engine while none is registered.
            take: take engines from runs that have not ended.
            rolling: load one engine after another.
            limit_nats: from this distance on an engine has other weights than it loaded; 0: none is asked.
        """
        self._control = control
        self._connect = connect
        self._clock = clock
        self._publisher = publisher
        self._run = run
        self._url = url
        self._take = take
        self._limit_nats = limit_nats
        self._turn = asyncio.Lock() if rolling else None
        self._following: dict[str, asyncio.Task[None]] = {}
        self._wanted_before: set[str] | None = None
        self._left: dict[str, EngineTaken] = {}
        """Address of an engine that is another run's -> how that was found."""

    async def run(self) -> None:
        """Load what is announced, until cancelled.

        Raises:
            EngineTaken: there is no engine that is not another run's.
        """
        try:
            while True:
                await self._match(self._wanted())
                await self._news()
        finally:
            await self._end(list(self._following))

    def _wanted(self) -> set[str]:
        found = in_pool(self._control.all(Backend), self._url)
        return {backend.url for backend in found if backend.run in {"", self._run}}

    async def _match(self, wanted: set[str]) -> None:
        """Follow these engines and no others."""
        await self._end([url for url in self._following if url not in wanted])
        for url, task in list(self._following.items()):
            if task.done():
                del self._following[url]
                self._note_end(url, task)
        self._left = {
            url: error for url, error in self._left.items() if url in wanted and not is_over(self._control, error.run)
        }
        if not wanted and self._wanted_before != wanted:
            log.warning("no engine is registered for run %s, and none for any run", self._run)
        for url in sorted(wanted - self._following.keys() - self._left.keys()):
            log.info("weights of run %s are brought to %s", self._run, url)
            self._following[url] = asyncio.create_task(self._follow(url))
        self._wanted_before = wanted
        if self._left and not self._following:
            raise next(iter(self._left.values()))

    def _note_end(self, url: str, task: asyncio.Task[None]) -> None:
        try:
            task.result()
        except EngineTaken as error:
            log.warning("%s is left alone: %s", url, error)
            self._left[url] = error

    async def _follow(self, url: str) -> None:
        client = self._connect(url)
        try:
            await WeightSync(
                self._control,
                client,
                self._clock,
                self._publisher,
                run=self._run,
                take=self._take,
                turn=self._turn,
                address=url,
                limit_nats=self._limit_nats,
            ).run()
        finally:
            await client.close()

    async def _news(self) -> None:
        """Wait until something else may be wanted, or an engine is followed no longer."""
        changed = asyncio.create_task(self._control.changed(LOOK_EVERY_S))
        try:
            await asyncio.wait({changed, *self._following.values()}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    async def _end(self, urls: list[str]) -> None:
        ending = [self._following.pop(url) for url in urls]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
