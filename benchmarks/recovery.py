"""A RUN worker with 64 tasks in flight is killed by -9: what is lost, what is done twice, how soon it goes on.

Two workers on a real Kafka with the product's defaults, supervised as `rollmill up` supervises them, so the killed one
comes back by itself. First, short episodes are done and committed; then every slot of both workers is filled with long
ones and one of the workers is killed. There is no rival, only bounds.

- `lost`: samples without a rollout, in all rounds; the short ones included;
- `repeated`: samples that were started more than once after a kill, in the worst round, as `events` tell it: those in
  flight must be, and no other may;
- `back_s`: from the kill until the last of the killed worker's tasks was started again, in the worst round.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks.kafka import local_kafka, log_with_topics
from benchmarks.result import Result
from benchmarks.simulated import FAMILY
from benchmarks.stage_processes import simulated_stages
from benchmarks.work import collect, ends, episodes, make_tasks, publish_to, subject, subject_of
from infra.bus import Bus, TopicPartition
from infra.clock import SystemClock
from infra.config import Config
from infra.errors import WaitTimeout
from infra.reading import read_between
from infra.service import name_begin
from infra.wire import unpack
from rollmill.supervisor import Restart, Supervisor
from schemas.messages import Task
from schemas.telemetry import EventKind, StageEvent
from schemas.topics import EPISODES, EVENTS, ROLLOUTS

ROUNDS = {True: 2, False: 10}
"""Quick or not -> kills."""

SHORT_S = 0.05
"""What an episode lasts that is done before the kill, seconds."""

LONG_S = 2.0
"""What an episode lasts that is killed, seconds: all of them are in flight at once."""

TOKENS = 256
"""Tokens of an episode's transcript."""

LOOK_S = 0.05
"""The log is asked this often, seconds."""

LIMIT_S = 60.0
"""Longest wait for what a round waits for, seconds."""

BACK_S = 3.0
"""Seconds after the session's end in which the work must have been taken up."""

WORKERS = 2
"""RUN workers; the first one is killed."""


@dataclass
class Recovery:
    """The log, the workers, and what was seen."""

    bus: Bus
    supervisor: Supervisor
    slots: int
    lost: int = 0
    repeated: list[int] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)

    async def round(self, number: int) -> None:
        """Kill one worker and note what became of its work."""
        heard, done = await ends(self.bus, EVENTS), await ends(self.bus, ROLLOUTS)
        short = self._tasks(f"short-{number}", SHORT_S)
        await publish_to(self.bus, EPISODES, episodes(short))
        await collect(self.bus, ROLLOUTS, done, short, limit_s=LIMIT_S)
        await self._committed()
        long = self._tasks(f"long-{number}", LONG_S)
        await publish_to(self.bus, EPISODES, episodes(long))
        victim = next(one.pid for one in self.supervisor.state().instances if one.instance == 0)
        held = await self._full(heard, long, name_begin("run", victim))
        killed_ms = SystemClock().now_ms()
        assert self.supervisor.kill("run", 0) == victim, "a worker that was killed before its time"
        with suppress(WaitTimeout):  # what is missing is counted below
            await collect(self.bus, ROLLOUTS, done, long, limit_s=LIMIT_S)
        self.ready_s.append(await self.supervisor.recovered("run", 0, since=victim))
        self.lost += len({subject(task) for task in (*short, *long)} - await self._subjects(done))
        events = await starts(self.bus, heard)
        self.repeated.append(repeated(events))
        self.back_s.append(back_s(events, held, killed_ms))

    def _tasks(self, run: str, seconds: float) -> list[Task]:
        """Return a full load of all workers: as many samples for each partition."""
        payloads = [{"run_s": seconds, "tokens": TOKENS, "index": index} for index in range(WORKERS * self.slots)]
        return make_tasks(run, payloads, family=FAMILY)

    async def _committed(self) -> None:
        """Return once all that lies in `episodes` is committed as done."""
        until = time.monotonic() + LIMIT_S
        end = await self.bus.end_offsets(EPISODES.name)
        while True:
            progress = await self.bus.committed("run", EPISODES.name)
            if all(part in progress and progress[part].offset == offset for part, offset in end.items() if offset):
                return
            if time.monotonic() > until:
                raise WaitTimeout(f"waited {LIMIT_S:g} s until RUN had committed what it had done")
            await asyncio.sleep(LOOK_S)

    async def _full(self, heard: Mapping[TopicPartition, int], tasks: Sequence[Task], worker: str) -> set[str]:
        """Return the samples in flight in a worker, once every slot of every worker is full."""
        until, wanted = time.monotonic() + LIMIT_S, {subject(task) for task in tasks}
        while True:
            by = {name_of(event): who for who, event in await starts(self.bus, heard)}
            if wanted <= by.keys():
                held = {name for name in wanted if by[name].startswith(worker)}
                assert len(held) == self.slots, f"{len(held)} tasks are in flight in {worker}, not {self.slots}"
                return held
            if time.monotonic() > until:
                missing = len(wanted - by.keys())
                raise WaitTimeout(f"waited {LIMIT_S:g} s for all slots to be full; {missing} tasks are not started")
            await asyncio.sleep(LOOK_S)

    async def _subjects(self, start: Mapping[TopicPartition, int]) -> set[str]:
        """Return the samples that have a rollout."""
        records = read_between(self.bus, SystemClock(), start, await ends(self.bus, ROLLOUTS))
        return {subject_of(record) async for record in records}


Started = tuple[str, StageEvent]
"""A worker, and what it started."""


async def starts(bus: Bus, since: Mapping[TopicPartition, int]) -> list[Started]:
    """Return the starts that `events` tell of, oldest first for each sample."""
    found: list[Started] = []
    async for record in read_between(bus, SystemClock(), since, await ends(bus, EVENTS)):
        told = (await unpack(EVENTS, record)).message
        found += [(told.worker, event) for event in told.events if event.kind is EventKind.STARTED]
    return found


def name_of(event: StageEvent) -> str:
    """Return the subject of an event's sample."""
    return f"{event.run}/{event.group}/{event.sample}"


def repeated(events: Iterable[Started]) -> int:
    """Return how many samples were started more than once."""
    return sum(count > 1 for count in Counter(name_of(event) for _, event in events).values())


def back_s(events: Iterable[Started], held: set[str], killed_ms: int) -> float:
    """Return the seconds from a kill until all that was in flight was started again.

    Raises:
        ValueError: something was not.
    """
    again: dict[str, int] = {}
    for _, event in events:
        if event.at_ms >= killed_ms and name_of(event) in held:
            again.setdefault(name_of(event), event.at_ms)
    if held - again.keys():
        raise ValueError(f"{len(held - again.keys())} of {len(held)} tasks were never started again")
    return (max(again.values()) - killed_ms) / 1000


def measure(*, quick: bool) -> Result:
    """Measure kills."""
    with local_kafka("recovery.") as config:
        return asyncio.run(_measure(Config(bus=config), ROUNDS[quick]))


async def _measure(config: Config, rounds: int) -> Result:
    async with (
        log_with_topics(config.bus) as bus,
        simulated_stages(config.bus, {"run": WORKERS}, restart=Restart.ALWAYS) as supervisor,
    ):
        recovery = Recovery(bus, supervisor, config.run.max_in_flight)
        for number in range(rounds):
            await recovery.round(number)
    worst_s = max(recovery.back_s)
    detail: dict[str, Any] = {
        "lost": recovery.lost,
        "repeated": max(recovery.repeated),
        "back_s": worst_s,
        "in_flight": recovery.slots,
        "session_timeout_s": config.bus.session_timeout_s,
        "rounds": {"repeated": recovery.repeated, "back_s": recovery.back_s, "worker_ready_s": recovery.ready_s},
    }
    return Result(
        name="recovery",
        ours=worst_s,
        rival=config.bus.session_timeout_s + BACK_S,
        unit="s from a kill -9 until all that was in flight runs again (worst round)",
        ratio=None,
        detail=detail,
    )
