"""How the pipeline stands: by the live board where one answers, else from the end of `events`."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from rich.console import Console

from infra.board.board import Board
from infra.board.view import Answer
from infra.clock import VirtualClock
from infra.config import BoardConfig, Config
from infra.loopback import HOST, find_free
from infra.memory import MemoryBus
from infra.wire import Publisher
from rollmill import output, standing
from rollmill.commands import status
from schemas.control import Breaker
from schemas.decisions import Action, Alarm, Guard
from schemas.partition import partition_for
from schemas.telemetry import EventKind, StageEvent, StageEvents
from schemas.topics import CONTROL, DEAD, DECISIONS, EVENTS, TABLE

NOW_MS = 1_700_000_000_000
MINUTE_MS = 60_000
PREFIX = "rollmill."


@pytest.fixture
def clock():
    return VirtualClock(NOW_MS)


@pytest.fixture
async def bus(clock):
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    return bus


@asynccontextmanager
async def answering(body: bytes = b"", *, code: int = 200, silent: bool = False):
    """Answer GET /board on a port, and give the configuration that names it."""
    port = find_free()

    async def board(_):
        if silent:
            await asyncio.Event().wait()
        return web.Response(body=body, status=code)

    app = web.Application()
    app.router.add_get("/board", board)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, HOST, port).start()
    try:
        yield Config(board=BoardConfig(url=f"http://{HOST}:{port}"))
    finally:
        await runner.cleanup()


def answer(*events, **changes):
    board = Board()
    for event in events:
        board.take(event, "run-7@elsewhere", NOW_MS)
    fields = {"prefix": PREFIX, "complete": True, "behind": 0, "board": board.view(NOW_MS), **changes}
    return msgspec.json.encode(Answer(**fields))


def started(sample=0, **changes):
    fields = {"run": "r", "group": "g", "attempt": 0, "stage": "run", "at_ms": NOW_MS - 45_000, **changes}
    return StageEvent(kind=fields.pop("kind", EventKind.STARTED), sample=sample, **fields)


async def say(bus, *events):
    message = StageEvents(worker="run-1@here", events=events)
    await Publisher(bus, bus.clock, "run-1").publish(EVENTS, message, partition=0)


async def stands(bus, config, window_ms=5 * MINUTE_MS):
    return await standing.standing(bus, bus.clock, config, window_ms)


def workers(found):
    return [stage.oldest.worker for stage in found.board.stages if stage.oldest]


async def test_the_live_board_is_shown_where_it_answers(bus):
    """Its view, not one made here."""
    await say(bus, started())
    async with answering(answer(started(), behind=3)) as config:
        found = await stands(bus, config)

    assert (["run-7@elsewhere"], "", 3) == (workers(found), found.note, found.behind)


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        (b"{}", 503, "still reads the log"),
        (b"<html>", 200, "no board of this version"),
        (b'{"prefix": 3}', 200, "no board of this version"),
        (answer(prefix="other."), 200, "shows the topics of 'other.', not of 'rollmill.'"),
        (answer(complete=False), 200, "a part of the topic only"),
    ],
)
async def test_a_board_that_cannot_be_believed_is_replaced_by_one_made_here(bus, body, code, reason):
    """And the reason is told in one line."""
    await say(bus, started())
    async with answering(body, code=code) as config:
        found = await stands(bus, config)

    assert ["run-1@here"] == workers(found)
    assert reason in found.note
    assert found.note.endswith("this was read from the end of `events`")
    assert "\n" not in found.note


async def test_a_board_that_is_down_or_silent_is_not_waited_for(bus, monkeypatch):
    """Status needs no other service to be alive."""
    await say(bus, started())
    down = await stands(bus, Config(board=BoardConfig(url=f"http://{HOST}:{find_free()}")))
    monkeypatch.setattr(standing, "BOARD_LIMIT_S", 0.05)
    async with answering(silent=True) as config:
        silent = await stands(bus, config)

    assert (["run-1@here"], ["run-1@here"]) == (workers(down), workers(silent))
    assert "no live board at" in down.note
    assert "no answer of a live board" in silent.note


async def test_dead_records_are_counted_in_all_and_lately(bus, clock):
    """By when they were buried."""
    for number in range(3):
        await bus.publish(DEAD.name, b"x", partition=number)
    await clock.advance(400)
    await bus.publish(DEAD.name, b"x", partition=1)
    found = await stands(bus, Config(board=BoardConfig(url=f"http://{HOST}:{find_free()}")))

    assert (4, 1) == (found.dead, found.dead_lately)


@pytest.fixture
def printed(monkeypatch):
    """Print as on a terminal of some width and return what stands there."""

    def on(width, found):
        console = Console(width=width, force_terminal=False)
        monkeypatch.setattr(output, "console", console)
        with console.capture() as captured:
            status.show(found, "5m")
        return captured.get()

    return on


async def shown(bus, *events):
    await say(bus, *events)
    return await stands(bus, Config(board=BoardConfig(url=f"http://{HOST}:{find_free()}")))


@pytest.mark.parametrize("width", [80, 120])
async def test_status_fits_the_terminal_and_tells_it_all(bus, printed, width):
    """Lag, in flight and ends by stage; the oldest of each with its age and what it waits for; dead records."""
    ends = [started(sample, kind=kind) for sample, kind in enumerate(status.KINDS, 10)]
    waits = started(kind=EventKind.WAITING, detail="policy version >= 3", at_ms=NOW_MS - 9_000)
    await bus.publish(DEAD.name, b"x")
    text = printed(width, await shown(bus, started(), waits, *ends))
    words = text.split()

    assert max(len(line) for line in text.splitlines()) <= width
    assert {"lag", "flight", *(kind.value for kind in status.KINDS)} <= set(words)
    assert "run 45 s r/g/0 on run-1@here waits for policy version >= 3" in " ".join(words)
    assert "1 in the last 5 minutes" in text
    assert "no live board" in text


async def test_names_from_the_log_do_nothing_to_the_terminal(bus, printed):
    """Anybody may write to the topic."""
    text = printed(100, await shown(bus, started(group="\x1b[2J", stage="[bold]x[/bold][/]")))

    assert "\x1b[2J" not in text
    assert "\\x1b[2J" in text
    assert "[bold]x[/bold][/]" in text


async def test_the_result_for_programs_is_plain(bus):
    """One JSON object with the same, and all windows."""
    found = await shown(bus, started(), started(1, kind=EventKind.FINISHED))
    result = msgspec.json.decode(msgspec.json.encode(status.described(found, "5m")))
    (run,) = (stage for stage in result["stages"] if stage["stage"] == "run")

    assert ("events", "5m", 300.0) == (result["source"], result["window"], result["window_s"])
    assert (1, 1, 0, 0) == (run["in_flight"], run["finished"], run["failed"], run["lag"])
    assert {"started": 1, "finished": 1} == run["windows"]["1m"]
    assert ("r", 0, 45.0) == (run["oldest"]["run"], run["oldest"]["sample"], run["oldest"]["age_s"])
    assert {"total": 0, "lately": 0} == result["dead"]


async def test_a_service_that_is_away_is_said_above_all(bus, printed):
    """It is why nothing moves; anybody may write its cause."""
    breaker = Breaker(
        service="policy",
        address="http://127.0.0.1:8000",
        stage="run",
        worker="run-1",
        open=True,
        since_ms=NOW_MS - 42_000,
        open_ms=42_000,
        cause="refused\x1b[2J",
        at_ms=NOW_MS,
    )
    await Publisher(bus, bus.clock, "run-1").publish(CONTROL, breaker)
    found = await shown(bus, started())
    text = printed(200, found)

    assert ["run"] == [one["stage"] for one in status.described(found, "5m")["paused"]]
    assert "RUN paused: policy at http://127.0.0.1:8000 away for 42 s (breaker open since" in text
    assert "\x1b[2J" not in text


async def test_alarms_of_trainers_are_shown_for_a_while(bus, clock, printed):
    """The newest ones, each with what follows; what lies before the window was said then."""
    partition = partition_for("r", DECISIONS.partitions)
    publisher = Publisher(bus, clock, "trainer")

    async def alarm(step, **changes):
        fields = {"value": 0.03, "bound": 0.1, "steps": 3, "action": Action.BACK, "cause": "entropy of 0.03 nats"}
        made = Alarm(run="r", epoch=0, step=step, guard=Guard.ENTROPY, **{**fields, **changes})
        await publisher.publish(DECISIONS, made, partition=partition)

    await alarm(7)
    await clock.advance(400)
    await bus.publish(DECISIONS.name, b"no decision", partition=partition)
    await alarm(12, cause="low\x1b[2J")
    found = await shown(bus, started())
    text = printed(120, found)

    assert [one["step"] for one in status.described(found, "5m")["alarms"]] == [12]
    assert "run r, step 12: low\\x1b[2J (entropy: the run goes back)" in text
