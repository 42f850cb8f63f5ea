"""What a person names in the log: RUN, RUN/GROUP or RUN/GROUP/SAMPLE; and what the log says of one without an outcome.

Unknown, on its way and withdrawn are told apart by what is written down: the run's manifest, the tasks, the cancels.
Nothing is written here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from infra.bus import Bus
from infra.clock import Clock
from infra.control import ControlView, control_now
from infra.middleware.deadline import reap_at_ms
from rollmill.covered import Covered
from rollmill.output import iso
from schemas.cancels import Cancels
from schemas.control import Cancel, RunManifest
from schemas.identity import run_name
from schemas.messages import Task
from schemas.topics import TASKS

MAX_NAMED = 10
"""Most runs that an error lists."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One sample, a group of siblings, or a run."""

    run: str
    """The run."""
    group: str = ""
    """Its group; empty for all."""
    sample: int | None = None
    """The sibling's number; none for all."""

    def covers(self, task: Task) -> bool:
        """Tell whether a task is of it."""
        return (
            task.run == self.run
            and self.group in {"", task.group}
            and (self.sample is None or self.sample == task.sample)
        )

    def __str__(self) -> str:
        parts = (self.run, self.group, "" if self.sample is None else str(self.sample))
        return "/".join(part for part in parts if part)


def parse_target(text: str) -> Target:
    """Return what a text names. Raises ValueError."""
    run, _, rest = text.partition("/")
    group, slash, number = rest.partition("/")
    if not group.isprintable() or (slash and not re.fullmatch("[0-9]{1,10}", number)) or ("/" in text and not group):
        raise ValueError(f"{text[:80]!r} names no sample; expected RUN, RUN/GROUP or RUN/GROUP/NUMBER")
    return Target(run=run_name(run), group=group, sample=int(number) if slash else None)


async def why_none(bus: Bus, clock: Clock, target: Target) -> str:
    """Return why a target has no outcome, for a person."""
    view = await control_now(bus, clock)
    task = await Covered(bus, clock, str(target)).first_task()
    if task is None:
        return await _unknown(bus, view, target)
    cancel = Cancels(view.all(Cancel)).of(task.run, task.group, task.sample)
    if cancel is not None:
        return f"{cancel.target} is cancelled ({cancel.cause}), and the reaper has not ended it yet: does it run?"
    if (until := reap_at_ms(task)) < clock.now_ms():
        return f"its time ran out at {iso(until)}, and the reaper has not ended it yet: does it run?"
    return f"its task is in `tasks`, so it is queued or running (`rollmill status`); at {iso(until)} it expires"


async def _unknown(bus: Bus, view: ControlView, target: Target) -> str:
    forgotten = any((await bus.begin_offsets(TASKS.name)).values())
    older = "; the oldest tasks are no longer in the log" if forgotten else ""
    if view.get(f"run/{target.run}", RunManifest) is not None:
        if target.group:
            return f"run {target.run!r} is known, but no task of it is {target}{older}"
        return f"run {target.run!r} is known, but none of its tasks is in the log{older}"
    known = sorted(manifest.run for manifest in view.all(RunManifest))
    more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
    return (
        f"there is no run {target.run!r} in this log{older}; known runs: {', '.join(known[:MAX_NAMED]) or 'none'}{more}"
    )
