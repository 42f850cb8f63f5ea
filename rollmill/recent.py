"""What the stages did lately, from `events`: finished, failed, and what is still in flight, oldest first.

Reads the end of the topic back to a window; work that began before the window and has not ended is not seen, and a
worker that was killed leaves its samples open here until another worker starts them again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from infra.bus import Bus
from infra.clock import Clock
from infra.reading import positions, read_between
from infra.wire import unpack
from schemas.codec import DecodeError
from schemas.telemetry import EventKind, StageEvent
from schemas.topics import EVENTS

TAIL_RECORDS = 20_000
"""Most records read back per partition."""

WINDOW_S = 3_600.0
"""Events older than this are left out, seconds."""


@dataclass
class RecentWork:
    """The events of a window, summed up."""

    window_s: float
    """Length of the window."""
    open: dict[str, dict[tuple[str, str, int], StageEvent]] = field(default_factory=dict)
    """Stage -> sample -> its start, for what has not ended."""
    finished: Counter[str] = field(default_factory=Counter)
    """Samples that went through, by stage."""
    failed: Counter[str] = field(default_factory=Counter)
    """Ends of another kind, by stage."""

    def take(self, event: StageEvent) -> None:
        """Count one event."""
        stage = self.open.setdefault(event.stage, {})
        key = (event.run, event.group, event.sample)
        if event.kind is EventKind.STARTED:
            stage[key] = event
            return
        stage.pop(key, None)
        counter = self.finished if event.kind is EventKind.FINISHED else self.failed
        counter[event.stage] += 1

    def oldest(self, stage: str, now_ms: int) -> str | None:
        """Return the oldest work in flight of a stage and its age, for a person."""
        work = self.open.get(stage)
        if not work:
            return None
        event = min(work.values(), key=lambda started: started.at_ms)
        age_s = (now_ms - event.at_ms) / 1000
        return f"{event.run}/{event.group}/{event.sample} for {age_s:.0f} s"


async def recent_work(bus: Bus, clock: Clock) -> RecentWork:
    """Return what the stages did in the window."""
    found = RecentWork(WINDOW_S)
    begin = positions(EVENTS, await bus.begin_offsets(EVENTS.name))
    end = positions(EVENTS, await bus.end_offsets(EVENTS.name))
    start = {tp: max(begin[tp], last - TAIL_RECORDS) for tp, last in end.items()}
    since_ms = clock.now_ms() - int(WINDOW_S * 1000)
    events: list[StageEvent] = []
    async for record in read_between(bus, clock, start, end):
        try:
            events.extend((await unpack(EVENTS, record, bus)).message.events)
        except DecodeError:
            continue  # the sink has it in `dead`
    for event in sorted(events, key=lambda event: event.at_ms):
        if event.at_ms >= since_ms:
            found.take(event)
    return found
