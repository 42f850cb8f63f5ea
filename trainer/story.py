"""What a run's log tells about it: its decisions, and every accepted outcome by where its task came from.

Two runs have other group ids (they are made from the run's name), so samples of two runs are told to be the same by
their place: the source, visit and row of the task, and the sibling's number. Token records are not kept; a sample
holds where its record lies, so that one can be read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from infra.bus import Bus
from infra.clock import Clock
from infra.errors import ConfigError
from infra.trajectories import read_run, trajectories_of
from infra.wire import Received
from schemas.arbiter import Ruling
from schemas.decisions import Member, StepDecided
from schemas.messages import Trajectory
from trainer.decision_log import read_started
from trainer.evidence import Evidence
from trainer.history import History
from trainer.terminal import terminal


class Place(NamedTuple):
    """Where a group's task came from; the same in every run that reads the source."""

    source: str
    visit: int
    row: int

    def __str__(self) -> str:
        return f"{self.source}[{self.row}]" + (f", visit {self.visit}" if self.visit else "")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An accepted outcome, without its tokens."""

    group: str
    """Its group in its own run."""
    sample: int
    """Sibling number."""
    offset: int
    """Where its record lies in the run's partition of `trajectories`."""
    content: str
    """SHA-256 of the record's uncompressed wire bytes."""
    outcome: str
    """What it came to, in a word: `completed`, or how it ended otherwise."""
    success: float
    """Unshaped success; 0 unless completed."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """A run as its log tells it."""

    run: str
    history: History
    groups: Mapping[Place, Mapping[int, Sample]]
    """Place -> sibling -> accepted outcome."""
    places: Mapping[str, Place]
    """Group -> place."""
    evidence: Evidence
    """What its steps rest on, as it lies in the log now."""

    @property
    def steps(self) -> Mapping[int, StepDecided]:
        """Step number -> decision."""
        return self.history.steps

    def batch(self, step: int) -> dict[Place, tuple[Member, ...]]:
        """Return the members of a step by place, in the batch's order.

        Raises:
            ConfigError: the record of a member is no longer in the log.
        """
        found: dict[Place, list[Member]] = {}
        for member in self.steps[step].members:
            place = self.places.get(member.group)
            if place is None:
                raise ConfigError(
                    f"run {self.run!r}, step {step}: no record of group {member.group} is left in `trajectories` "
                    f"(recorded at offset {member.offset}): the log was cut by its retention, nothing can be compared"
                )
            found.setdefault(place, []).append(member)
        return {place: tuple(members) for place, members in found.items()}

    def used_in(self, place: Place) -> int | None:
        """Return the step that trained on a place, if one did."""
        groups = {sample.group for sample in self.groups.get(place, {}).values()}
        return next((n for n, step in self.steps.items() for m in step.members if m.group in groups), None)


async def read_story(bus: Bus, clock: Clock, run: str) -> Story:
    """Read a run up to where the log ends now.

    Raises:
        ConfigError: no trainer ever started on the run.
    """
    history, start = await read_started(bus, clock, run)
    tale = _Tale()
    partition = trajectories_of(run)
    end = (await bus.end_offsets(partition.topic))[partition.partition]
    async for received in read_run(bus, clock, run, start, end):
        tale.add(received)
    return Story(run=run, history=history, groups=tale.groups, places=tale.places, evidence=tale.evidence)


async def read_one(bus: Bus, clock: Clock, run: str, offset: int) -> Trajectory | None:
    """Return the trajectory at an offset of a run's partition; none if it cannot be read any more."""
    found = [received.message async for received in read_run(bus, clock, run, offset, offset + 1)]
    return found[0] if found else None


@dataclass
class _Tale:
    """Collects outcomes as the arbiter accepts them."""

    groups: dict[Place, dict[int, Sample]] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=Evidence)

    def add(self, received: Received[Trajectory]) -> None:
        found, task = terminal(received, None, keep_tokens=False), received.message.task
        if self.evidence.add(found) is not Ruling.ACCEPTED:
            return
        place = self.places.setdefault(task.group, Place(task.source, task.visit, task.row))
        self.groups.setdefault(place, {})[task.sample] = Sample(
            group=task.group,
            sample=task.sample,
            offset=found.offset,
            content=found.content,
            outcome="completed" if found.completed else type(received.message.outcome).__name__.lower(),
            success=found.success,
        )
