"""Why no batch forms: what the next step of a run needs, what is there, and what the rest waits for.

The log is fed through the trainer's own rules, as they were recorded when it started, up to its end. So this says what
a trainer decides that has read everything, whether one runs or not; what it has not written down yet is due. Where an
open sample is, `events` and the board know; here is only which one. Nothing is decided or written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from infra.bus import Bus
from infra.clock import Clock
from infra.control import ControlView, control_now
from infra.trajectories import read_run, trajectories_of
from schemas.control import Cancel, Credit, Cursor
from trainer.decision_log import read_started
from trainer.groups import AssemblerState, Dropped, Event, GroupAssembler, Step
from trainer.history import History, algorithm_of, rules_of
from trainer.terminal import terminal

SHOWN = 5
"""Begun groups that are named."""


@dataclass(frozen=True, kw_only=True)
class Due:
    """A step that is decided by the log and not yet by a trainer."""

    step: int
    """Its number."""
    position: int
    """Next offset after the record that completed its batch."""
    behind: int
    """Offsets of `trajectories` between there and the end of the partition."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What the next step waits for."""

    run: str
    """The run."""
    step: int
    """The next step."""
    needed: int
    """Groups that it takes."""
    kept: int
    """Complete groups that wait for it."""
    begun: int
    """Groups some of whose siblings have ended."""
    missing: Mapping[str, tuple[int, ...]]
    """Begun group -> siblings that have not ended; the oldest groups first, SHOWN of them."""
    dropped: Mapping[str, int]
    """Groups dropped since the last step, by reason."""
    recent_success: float | None
    """Mean success of the last complete groups; none if there is none."""
    admitted: int | None
    """Groups that the feeder has published; none if none ever fed the run."""
    admit_up_to: int | None
    """Groups that it may publish; none if no trainer ever gave credit."""
    unseen: int | None
    """Admitted groups none of whose siblings has ended; none if nothing is admitted."""
    due: Due | None
    """The step, if it is decided already and only not written down."""
    cancelled: str | None
    """Why the run was cancelled, if it was."""
    ended: str | None
    """Why the run has ended, if it has."""

    def causes(self) -> tuple[str, ...]:
        """Return why no batch forms, the most decisive reason first."""
        return tuple(self._causes())

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**asdict(self), "causes": list(self.causes())}

    def _causes(self) -> Iterator[str]:
        if self.ended is not None:
            yield f"the run has ended ({self.ended}): there is no next step. `rollmill train --resume` goes on with it"
            return
        if self.cancelled is not None:
            yield f"the run is cancelled ({self.cancelled}): it is given no more tasks"
        if self.due is not None:
            yield (
                f"the batch of step {self.due.step} is complete since offset {self.due.position - 1}, "
                f"{self.due.behind} offsets before the end: its trainer is still busy with the step before, or does "
                f"not run"
            )
            return
        yield from self._of_groups()
        yield from self._of_credit()

    def _of_groups(self) -> Iterator[str]:
        short = self.needed - self.kept
        if short > 0:
            yield f"step {self.step} takes {self.needed} groups, {self.kept} are complete: {short} to go"
        else:
            yield (
                f"step {self.step} takes {self.needed} groups, {self.kept} are complete; it waits for an older one "
                f"that could not be used in time after it (algorithm.late = wait)"
            )
        for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1]):
            yield f"{count} groups were dropped as {reason} since the last step{self._meaning(reason)}"
        if self.begun:
            group, siblings = next(iter(self.missing.items()))
            numbers = ", ".join(map(str, siblings))
            yield (
                f"{self.begun} groups are begun; the oldest, {group}, still misses sample {numbers}. `rollmill show "
                f"{self.run}/{group}/{siblings[0]}` says how it goes, `rollmill status` what it waits for"
            )

    def _meaning(self, reason: str) -> str:
        if reason != "filtered" or self.recent_success is None:
            return ""
        kind = "too easy" if self.recent_success > 0.5 else "too hard"
        return (
            f": all siblings ended alike. Mean success is {self.recent_success:.2f}, so the tasks are {kind} for the "
            f"policy; choose others, or train on the shaped reward (algorithm.filter)"
        )

    def _of_credit(self) -> Iterator[str]:
        if self.admit_up_to is None:
            yield "no trainer has given the feeder credit yet: none has come through its start"
        elif self.admitted is None:
            yield "no feeder has published a group yet: start one (`rollmill feeder`), or publish tasks"
        elif self.admitted < self.admit_up_to:
            yield (
                f"the feeder may publish {self.admit_up_to} groups and has published {self.admitted}: it does not "
                f"run, its source has ended, or it has only just been allowed to"
            )
        if self.unseen:
            yield f"{self.unseen} admitted groups have no outcome yet: they are queued or running"


async def explain(bus: Bus, clock: Clock, run: str) -> Waiting:
    """Return what the next step of a run waits for.

    Raises:
        ConfigError: no trainer ever started on the run.
    """
    history, start = await read_started(bus, clock, run)
    return await _waiting(bus, clock, run, history, start, await control_now(bus, clock))


async def _waiting(bus: Bus, clock: Clock, run: str, history: History, start: int, control: ControlView) -> Waiting:
    algorithm = algorithm_of(history.config)
    partition = trajectories_of(run)
    end = (await bus.end_offsets(partition.topic))[partition.partition]
    assembler = GroupAssembler(
        rules_of(history.config),
        AssemblerState.fresh(start),
        script=history.script(0),
        versions=history.made_by,
    )
    dropped: Counter[str] = Counter()
    due: Due | None = None
    async with aclosing(read_run(bus, clock, run, start, end)) as outcomes:
        async for received in outcomes:
            events = assembler.feed(terminal(received, algorithm.overlong, keep_tokens=False))
            while events and due is None:
                due = _counted(events, dropped, end)
                events = assembler.due()
            if due is not None:
                break
    cursor, credit = control.get(f"cursor/{run}", Cursor), control.get(f"credit/{run}", Credit)
    cancel = control.get(f"cancel/{run}", Cancel)
    return Waiting(
        run=run,
        step=assembler.steps + (due is None),
        needed=algorithm.groups,
        kept=assembler.kept,
        begun=assembler.open_groups,
        missing=dict(list(assembler.missing().items())[:SHOWN]),
        dropped=dict(dropped),
        recent_success=sum(assembler.recent) / len(assembler.recent) if assembler.recent else None,
        admitted=cursor.admitted if cursor else None,
        admit_up_to=credit.admit_up_to if credit else None,
        unseen=max(0, cursor.admitted - assembler.seen) if cursor else None,
        due=due,
        cancelled=cancel.cause if cancel else None,
        ended=history.ended.reason if history.ended else None,
    )


def _counted(events: Sequence[Event], dropped: Counter[str], end: int) -> Due | None:
    """Count what was dropped since the last recorded step; return the step that is not recorded, if there is one."""
    due = None
    for event in events:
        match event:
            case Step(recorded=None):
                due = Due(step=event.number, position=event.position, behind=end - event.position)
            case Step():
                dropped.clear()
            case Dropped():
                dropped[event.reason.value] += 1
    return due
