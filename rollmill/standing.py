"""How the pipeline stands: lag, the live board, what lies in `dead`, which service is away, alarms of trainers.

The board is asked of its service and, where that does not answer in BOARD_LIMIT_S or cannot be believed, made here from
the end of `events`: the same board from the same records, only slower. So nothing depends on the service.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import msgspec

from infra.board.board import Board
from infra.board.feed import Feed, rebuild
from infra.board.view import Answer, BoardView
from infra.bus import Bus
from infra.clock import Clock
from infra.config import Config
from infra.errors import ServiceError
from infra.reading import positions, read_between
from infra.wire import unpack
from rollmill.breakers import Standstill, standstills
from rollmill.lag import StageLag, stage_lags
from schemas.codec import DecodeError
from schemas.decisions import Alarm
from schemas.topics import DEAD, DECISIONS

BOARD_LIMIT_S = 2.0
"""Longest wait for the live board, seconds."""

ANSWER_BYTES = 4 * 1024 * 1024
"""Largest answer of a board that is read, bytes."""


class NoBoard(ServiceError):
    """The live board does not answer, or not with what can be shown."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How the pipeline stands."""

    lags: list[StageLag]
    """Records that each stage has not committed."""
    board: BoardView
    """What the samples do."""
    behind: int
    """Records of `events` that the board has still to read."""
    note: str
    """Why the board was made here; empty where its service answered."""
    dead: int
    """Records in `dead`."""
    dead_lately: int
    """Those of them that came within the window."""
    paused: list[Standstill]
    """Stages that stand still."""
    alarms: list[Alarm]
    """What the guards of trainers noticed within the window, oldest first."""


async def standing(bus: Bus, clock: Clock, config: Config, window_ms: int) -> Standing:
    """Return how the pipeline stands.

    Args:
        bus: the log.
        clock: time.
        config: says where the board is.
        window_ms: what counts as lately, milliseconds.
    """
    since_ms = clock.now_ms() - window_ms
    lags, dead, (board, behind, note), paused, alarms = await asyncio.gather(
        stage_lags(bus),
        _dead(bus, since_ms),
        _board(bus, clock, config),
        standstills(bus, clock),
        alarms_since(bus, clock, since_ms),
    )
    return Standing(
        lags=lags,
        board=board,
        behind=behind,
        note=note,
        dead=dead[0],
        dead_lately=dead[1],
        paused=paused,
        alarms=alarms,
    )


async def _board(bus: Bus, clock: Clock, config: Config) -> tuple[BoardView, int, str]:
    try:
        answer = await ask(config.board.url, prefix=config.bus.prefix)
    except NoBoard as error:
        feed = Feed(Board(), bus, clock)
        await rebuild(feed, bus, clock)
        return feed.view(), 0, f"{error}; this was read from the end of `events`"
    return answer.board, answer.behind, ""


async def ask(url: str, *, prefix: str) -> Answer:
    """Return what the live board says.

    Raises:
        NoBoard: it does not answer in time, is not ready, or shows the topics of another prefix.
    """
    try:
        async with asyncio.timeout(BOARD_LIMIT_S), aiohttp.ClientSession() as session:
            async with session.get(f"{url}/board") as response:
                body = await response.content.read(ANSWER_BYTES)
            if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
                raise NoBoard(f"the live board at {url} still reads the log")
            answer = msgspec.json.decode(body, type=Answer)
    except TimeoutError as error:
        raise NoBoard(f"no answer of a live board at {url} in {BOARD_LIMIT_S:g} s") from error
    except aiohttp.ClientError as error:
        raise NoBoard(f"no live board at {url}") from error
    except msgspec.DecodeError as error:
        raise NoBoard(f"what answers at {url} is no board of this version ({error})") from error
    if answer.prefix != prefix:
        raise NoBoard(f"the live board at {url} shows the topics of {answer.prefix!r}, not of {prefix!r}")
    if not answer.complete:
        raise NoBoard(f"the live board at {url} follows a part of the topic only")
    return answer


async def alarms_since(bus: Bus, clock: Clock, since_ms: int) -> list[Alarm]:
    """Return the alarms that were written down since a time, those of trainers that were replaced meanwhile too."""
    since = positions(DECISIONS, await bus.offsets_since(DECISIONS.name, since_ms))
    end = positions(DECISIONS, await bus.end_offsets(DECISIONS.name))
    found: list[tuple[int, Alarm]] = []
    async for record in read_between(bus, clock, since, {tp: offset for tp, offset in end.items() if tp in since}):
        with suppress(DecodeError):  # the sink reports it
            decision = (await unpack(DECISIONS, record, bus)).message
            if isinstance(decision, Alarm):
                found.append((record.timestamp_ms, decision))
    return [alarm for _, alarm in sorted(found, key=lambda item: item[0])]


async def _dead(bus: Bus, since_ms: int) -> tuple[int, int]:
    """Return how many records lie in `dead`, and how many of them came since a time."""
    begin, since = await bus.begin_offsets(DEAD.name), await bus.offsets_since(DEAD.name, since_ms)
    end = await bus.end_offsets(DEAD.name)
    return sum(end[part] - begin[part] for part in end), sum(max(0, end[part] - since[part]) for part in end)
