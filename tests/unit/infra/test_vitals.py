"""What a worker says about itself."""

from __future__ import annotations

import asyncio

from infra.clock import VirtualClock, settle
from infra.memory import MemoryBus
from infra.vitals import ALARM_S, REPORT_S, Vitals
from infra.wire import Publisher, unpack
from schemas.topics import METRICS, TABLE
from tests.logs import read_all


class HeldClock(VirtualClock):
    """A clock on which one sleep lasts longer than asked for, as when something holds the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.hold_s = 0.0

    async def sleep(self, seconds):
        held, self.hold_s = self.hold_s, 0.0
        await super().sleep(seconds + held)


async def measured(clock, caplog):
    bus = MemoryBus(clock)
    await bus.create_topics(TABLE)
    vitals = Vitals(Publisher(bus, clock, "t"), clock, stage="run", worker="run-1@h", gauges=lambda: {"in_flight": 3})
    running = asyncio.create_task(vitals.run())
    await settle()
    await clock.advance(REPORT_S + 2 * ALARM_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    records = [(await unpack(METRICS, record)).message for record in await read_all(bus, METRICS)]
    return {point.name: round(point.value, 3) for point in records[0].points}


async def test_a_loop_in_time_reports_its_gauges_and_no_lag(caplog):
    """The points carry the stage in their names."""
    assert {"run.loop_lag_s": 0.0, "run.in_flight": 3} == await measured(VirtualClock(), caplog)
    assert caplog.messages == []


async def test_a_loop_that_was_held_is_an_alarm(caplog):
    """Whoever blocks the loop is told before the group throws the member out."""
    clock = HeldClock()
    clock.hold_s = 1.5 * ALARM_S

    assert (await measured(clock, caplog))["run.loop_lag_s"] == 1.5 * ALARM_S
    assert "the event loop was held for 1.5 s" in caplog.text
