"""What a run's log tells about it: its decisions, and every accepted outcome by where its task came from.

Two runs have other group ids (they are made from the run's name), so samples of two runs are told to be the same by
their place: the source, visit and row of the task, and the sibling's number. Token records are not kept; a sample
holds where its record lies, so that one can be read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from infra.bus import Bus
from infra.clock import Clock
from infra.errors import ConfigError
from infra.trajectories import read_run, trajectories_of
from infra.wire import Received
from schemas.arbiter import Arbiter, Ruling
from schemas.batch import content_hash
from schemas.decisions import Member, StepDecided
from schemas.messages import Trajectory
from schemas.outcome import Completed
from trainer.decision_log import read_started
from trainer.history import History


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

    def changed(self, step: int) -> Iterator[tuple[Member, str]]:
        """Yield the members of a step whose record is not the one that was decided on, and what became of it."""
        for member in self.steps[step].members:
            place = self.places.get(member.group)
            sample = self.groups[place].get(member.sample) if place is not None else None
            if sample is None:
                yield member, "is no longer there, or cannot be read"
            elif sample.offset != member.offset:
                yield member, f"is no longer the first outcome: offset {sample.offset} is"
            elif sample.content != member.content:
                yield member, f"had content {member.content[:12]}, it has {sample.content[:12]}: its bytes were changed"


async def read_story(bus: Bus, clock: Clock, run: str) -> Story:
    """Read a run up to its last decision.

    Raises:
        ConfigError: no trainer ever started on the run.
    """
    history, start = await read_started(bus, clock, run)
    tale = _Tale()
    partition = trajectories_of(run)
    end = (await bus.end_offsets(partition.topic))[partition.partition]
    async for received in read_run(bus, clock, run, start, end):
        tale.add(received)
    return Story(run=run, history=history, groups=tale.groups, places=tale.places)


async def read_one(bus: Bus, clock: Clock, run: str, offset: int) -> Trajectory | None:
    """Return the trajectory at an offset of a run's partition; none if it cannot be read any more."""
    found = [received.message async for received in read_run(bus, clock, run, offset, offset + 1)]
    return found[0] if found else None


@dataclass
class _Tale:
    """Collects outcomes as the arbiter accepts them."""

    groups: dict[Place, dict[int, Sample]] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    _arbiter: Arbiter = field(default_factory=Arbiter)

    def add(self, received: Received[Trajectory]) -> None:
        trajectory, offset = received.message, received.record.offset
        task, outcome = trajectory.task, trajectory.outcome
        ruling = self._arbiter.rule(task.group, task.sample, task.payload_digest, offset)
        if ruling is not Ruling.ACCEPTED:
            return
        place = self.places.setdefault(task.group, Place(task.source, task.visit, task.row))
        graded = isinstance(outcome, Completed)
        self.groups.setdefault(place, {})[task.sample] = Sample(
            group=task.group,
            sample=task.sample,
            offset=offset,
            content=content_hash(received.raw),
            outcome="completed" if graded else type(outcome).__name__.lower(),
            success=outcome.success if isinstance(outcome, Completed) else 0.0,
        )
