"""The board as a Faust application: follows `events`, serves the board over HTTP on loopback.

- `GET /board`: an `Answer`; 503 until what was in the log at the start is read;
- `GET /board/sample/<run>/<group>/<sample>`: a `SampleView`, or 404.

What Faust is allowed here is little, and each setting that holds it says why. State is the plain object of `board.py`
and no Faust table: a table writes a changelog topic per table into the log that it only means to read, and recovers
from that for as long as the topic is old; a board is rebuilt from the last records of `events` in seconds. For the same
reason each life has a consumer group of its own, beginning at the end: a group that lives on would hand a board the
backlog of the time that it was away, and two boards would share the partitions and show half of everything each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faust
import msgspec
from faust.app.base import BootStrategy
from faust.types import EventT, StreamT
from faust.web import Request, Response, View

from infra.board.board import Board
from infra.board.feed import Feed, rebuild
from infra.board.guard import Guard
from infra.board.view import Answer
from infra.bus import Bus, Record
from infra.clock import Clock
from infra.config import BusConfig
from infra.errors import ServiceError
from infra.loopback import HOST
from infra.security import Security
from schemas.topics import EVENTS

log = logging.getLogger(__name__)

START_S = 60.0
"""Longest wait until Faust has joined its group, seconds."""

STOP_S = 5.0
"""Longest wait until Faust has left it and ended its thread, seconds."""

REQUEST_S = 30.0
"""A request to the broker may take this much longer than a session, seconds."""

JSON = "application/json"


class _ReadOnly(BootStrategy):
    """Starts no producer: what cannot write, changes nothing."""

    enable_kafka_producer = False


class _App(faust.App):
    BootStrategy = _ReadOnly


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a board is."""

    port: int
    """Port on loopback."""
    datadir: Path
    """Faust makes this directory and keeps nothing in it."""
    memory_mb: int
    """A board that holds more ends itself, megabytes."""


class BoardService:
    """One board that follows the log."""

    def __init__(self, bus: Bus, clock: Clock, config: BusConfig, place: Place) -> None:
        self._bus = bus
        self._clock = clock
        self._config = config
        self._place = place
        self._feed = Feed(Board(), bus, clock)
        self._guard = Guard(self._feed, bus, clock, memory_mb=place.memory_mb)
        self._rebuilt = asyncio.Event()
        self._app = self._make_app()
        self._add_agent(self._app)
        self._add_pages(self._app)

    async def run(self) -> None:
        """Follow and serve until cancelled.

        Raises:
            ServiceError: Faust did not start, broke, or stands still.
        """
        async with self._started():
            await rebuild(self._feed, self._bus, self._clock)
            self._rebuilt.set()
            log.info("board at http://%s:%d/board", HOST, self._place.port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._guard.watch())
                group.create_task(self._until_broken())

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[None]:
        self._place.datadir.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(START_S):
                await self._app.start()
            yield
        except TimeoutError as error:
            raise ServiceError(f"waited {START_S:g} s for Faust to join {self._app.conf.id}; is Kafka well?") from error
        finally:
            await self._stop()

    async def _stop(self) -> None:
        """End Faust, or, where it does not end in time, this process."""
        # Its consumer has a thread, which is joined without a limit and on this event loop: no timeout of the loop
        # would ever fire. A process that hangs here could not be started again, and it holds nothing.
        last = threading.Timer(STOP_S, os._exit, args=(1,))
        last.daemon = True
        last.start()
        stopping = asyncio.ensure_future(self._app.stop())
        while not stopping.done():
            with suppress(asyncio.CancelledError):  # a second signal: the thread must not outlive the loop either
                await asyncio.wait({stopping})
        last.cancel()

    async def _until_broken(self) -> None:
        await self._app.wait_until_stopped()
        raise ServiceError(f"Faust ended by itself: {self._app.crash_reason!r}")

    def _make_app(self) -> _App:
        return _App(
            f"{self._config.prefix}board-{secrets.token_hex(4)}",
            env={},  # Faust reads names as common as DEBUG and WEB_PORT from the environment
            autodiscover=False,
            broker=[f"kafka://{address.strip()}" for address in self._config.bootstrap.split(",")],
            broker_credentials=_credentials(self._config.security.open()),
            broker_session_timeout=self._config.session_timeout_s,
            broker_heartbeat_interval=self._config.heartbeat_s,
            broker_request_timeout=self._config.session_timeout_s + REQUEST_S,  # refused if it is the shorter one
            consumer_auto_offset_reset="latest",  # what is older comes from `rebuild`
            stream_wait_empty=False,  # else a rebalance waits for an agent that waits for `rebuild`
            store="memory://",
            datadir=self._place.datadir,
            topic_allow_declare=False,  # topics are made from the table, by the command that does so
            topic_disable_leader=True,  # else there is a topic for its election
            reply_create_topic=False,
            web_bind=HOST,
            web_host=HOST,
            web_port=self._place.port,
            # What we serve is below; the rest shows tables, workers and settings to whoever asks.
            web_tables_enabled=False,
            web_router_enabled=False,
            web_stats_enabled=False,
            web_graph_enabled=False,
        )

    def _add_agent(self, app: _App) -> None:
        topic = app.topic(
            self._config.prefix + EVENTS.name,
            key_serializer="raw",
            value_serializer="raw",
            key_type=bytes,
            value_type=bytes,
        )

        # One at a time: with more Faust commits past a record that is still in work, and loses it when killed.
        @app.agent(topic, name="board", concurrency=1)
        async def follow(stream: StreamT[bytes]) -> None:
            await self._rebuilt.wait()
            async for event in stream.events():
                await self._feed.take(_record(event, self._config.prefix))

    def _add_pages(self, app: _App) -> None:
        @app.page("/board")
        async def whole(view: View, _: Request) -> Response:
            if not self._rebuilt.is_set():
                return _json(view, {"error": "the board is being read from the log"}, status=503)
            return _json(view, self._answer())

        @app.page("/board/sample/{run}/{group}/{sample}")
        async def one(view: View, _: Request, run: str, group: str, sample: str) -> Response:
            found = self._feed.sample(run, group, sample)
            if found is None:
                return _json(view, {"error": f"nothing is known of {run}/{group}/{sample}"}, status=404)
            return _json(view, found)

    def _answer(self) -> Answer:
        followed = {tp.partition for tp in self._app.consumer.assignment()}
        return Answer(
            prefix=self._config.prefix,
            complete=len(followed) == EVENTS.partitions,
            behind=self._guard.behind,
            board=self._feed.view(),
        )


def _record(event: EventT[Any], prefix: str) -> Record:
    """Return Faust's event as a record of the log."""
    message = event.message
    headers = message.headers or ()  # a map or pairs, as the client gave them
    return Record(
        topic=message.topic.removeprefix(prefix),
        partition=message.partition,
        offset=message.offset,
        timestamp_ms=int(message.timestamp * 1000),
        key=message.key,
        value=message.value,
        headers=tuple(headers.items()) if isinstance(headers, Mapping) else tuple(headers),
    )


def _json(view: View, value: object, *, status: int = 200) -> Response:
    return view.bytes(msgspec.json.encode(value), content_type=JSON, status=status)


def _credentials(security: Security) -> faust.auth.Credentials | None:
    """Return what proves us to the brokers, in Faust's words."""
    if security.protocol.with_user:
        return faust.auth.SASLCredentials(
            username=security.user, password=security.password, mechanism=security.mechanism, ssl_context=security.tls
        )
    return faust.auth.SSLCredentials(context=security.tls) if security.protocol.encrypted else None
