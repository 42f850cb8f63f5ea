"""Dead letters -> tasks: what was given up is done again, as a new group.

A decided group is never reopened: the first terminal record of a sample stays its outcome. So the task of a dead
letter becomes a group of its own, complete with all its siblings, one visit later, that names the old one in
`redrive_of`. Its id is derived from the old group, so several dead siblings make one new group, and redriving twice
makes the same one: the second time it is found in the log (`redriven.py`) and left alone, unless it is asked for; then
the arbiter absorbs what is there twice. The seed stays: it is the same work. A redriven task has no admission number,
like those of foreign producers: no trainer waits for it, and it takes nobody's place.

Two redrives at once may both find nothing in the log yet, and publish one group twice. That costs a second rollout of
each sample and nothing else: the ids are the same, the first outcome counts, and should both copies die, their letters
speak of one group, which the next redrive makes once.

Not everything can be redriven: bytes that still are no message, a value that was cut, a task that would end the same
way, work of a run that is cancelled, which every stage would skip. Each such letter is refused with its reason, and the
rest goes on. This file does not know how letters are chosen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from infra.bus import Bus
from infra.claims import carried_bytes
from infra.clock import Clock
from infra.control import control_now
from infra.dead_letter import CONFLICT, NOT_STORED, DeadLetter
from infra.errors import RollmillError
from infra.wire import Publisher, task_of
from producers.publish import publish_tasks
from producers.redriven import Sought, published
from schemas.cancels import Cancels
from schemas.codec import DecodeError
from schemas.control import Cancel, RunManifest
from schemas.identity import group_id, redriven_place
from schemas.messages import MAX_TIME_MS, TASK_RANGES, Task, Trajectory
from schemas.task_flaws import flaw

MAX_SIBLINGS = 1024
"""Largest group that is expanded: a foreign task may claim billions of siblings."""

MAX_REFUSALS = 100
"""Most refusals kept with their reason; the others are counted."""

BATCH_BYTES = 64 * 1024 * 1024
"""Letters whose groups are looked for in the log together, in bytes."""

TASK_BYTES = 1_000
"""What a task takes in memory beside the bytes of its letter, roughly."""

START_WITHIN_S = 86_400.0
"""A task of a run without a manifest, whose own time had run out, may start for so long, seconds."""


class NotRedrivable(RollmillError):
    """A dead letter holds no task that could be done again."""


class Redriven(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was made of dead letters."""

    run: str
    """Its run."""
    group: str
    """The new group."""
    redrive_of: str
    """The group whose work it repeats."""
    samples: int
    """Its siblings: so many tasks were published."""
    letter: str
    """The first letter that asked for it."""


@dataclass
class Report:
    """What became of the letters."""

    groups: dict[str, Redriven] = field(default_factory=dict)
    """New group -> what it was made of, in order."""
    before: dict[str, Redriven] = field(default_factory=dict)
    """The same of groups that were in the log already, and were left alone."""
    letters: int = 0
    """Letters that were redriven; several may share a group."""
    letters_before: int = 0
    """Letters whose group was left alone."""
    refused: int = 0
    """Letters that were not."""
    refusals: list[tuple[str, str]] = field(default_factory=list)
    """(letter, reason) of the first ones that were not."""

    def refuse(self, letter: DeadLetter, error: NotRedrivable) -> None:
        """Note a letter that is not redriven."""
        self.refused += 1
        if len(self.refusals) < MAX_REFUSALS:
            self.refusals.append((letter.id, str(error)))


@dataclass
class _Work:
    """A group to publish, and what asked for it."""

    tasks: list[Task]
    letter: DeadLetter
    letters: int = 1

    @property
    def sought(self) -> Sought:
        task = self.tasks[0]
        return Sought(run=task.run, group=task.group, samples=task.samples, died_ms=self.letter.died_ms)

    @property
    def told(self) -> Redriven:
        task = self.tasks[0]
        return Redriven(
            run=task.run,
            group=task.group,
            redrive_of=task.redrive_of or "",
            samples=task.samples,
            letter=self.letter.id,
        )


class Redrive:
    """Publishes the tasks of dead letters again."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._publisher = Publisher(bus, clock, "redrive")

    async def run(self, letters: AsyncIterator[DeadLetter], *, again: bool = False) -> Report:
        """Redrive letters.

        Args:
            letters: what is to be done again.
            again: publish also what an earlier redrive has published.
        """
        control, report = await control_now(self._bus, self._clock), Report()
        manifests = {manifest.run: manifest for manifest in control.all(RunManifest)}
        cancels = Cancels(control.all(Cancel))
        batch: dict[str, _Work] = {}
        size = 0
        async for letter in letters:
            try:
                task = await work_of(letter)
                tasks = siblings(task, start_by_ms=self._start_by_ms(letter, task, manifests.get(task.run)))
                _refuse_cancelled(tasks, cancels)
            except NotRedrivable as error:
                report.refuse(letter, error)
                continue
            group = tasks[0].group
            if group in report.groups:
                report.letters += 1
            elif group in report.before:
                report.letters_before += 1
            elif group in batch:
                batch[group].letters += 1
            else:
                batch[group] = _Work(tasks, letter)
                size += carried_bytes(letter.record) + len(tasks) * TASK_BYTES
            if size >= BATCH_BYTES:
                await self._publish(batch, report, again=again)
                batch, size = {}, 0
        await self._publish(batch, report, again=again)
        return report

    async def _publish(self, batch: Mapping[str, _Work], report: Report, *, again: bool) -> None:
        """Publish the groups of a batch that are not in the log yet."""
        sought = [] if again else [work.sought for work in batch.values()]
        there = await published(self._bus, self._clock, sought) if sought else frozenset()
        for group, work in batch.items():
            if group in there:
                report.before[group] = work.told
                report.letters_before += work.letters
            else:
                await publish_tasks(self._publisher, work.tasks)
                report.groups[group] = work.told
                report.letters += work.letters

    def _start_by_ms(self, letter: DeadLetter, task: Task, manifest: RunManifest | None) -> int:
        """Return until when the task may start: from now on as long as its run gives, or else as it had at first."""
        if manifest is not None:
            span_ms = int(manifest.start_within_s * 1000)
        else:
            left_ms = task.start_by_ms - letter.original.timestamp_ms
            span_ms = left_ms if left_ms > 0 else int(START_WITHIN_S * 1000)
        return min(self._clock.now_ms() + span_ms, MAX_TIME_MS)


async def work_of(letter: DeadLetter) -> Task:
    """Return the task that a dead letter is or embeds.

    Raises:
        NotRedrivable: it has none, or one that would end the same way again.
    """
    if letter.death.kind == NOT_STORED:
        raise NotRedrivable("the sink could not store it; the stages dealt with it, so there is nothing to do again")
    if letter.death.kind == CONFLICT:
        raise NotRedrivable("its id belongs to another task: publish its task again under an id of its own")
    try:
        message = await letter.message()
    except DecodeError as error:
        raise NotRedrivable(f"no task can be read from it: {error}") from error
    task = task_of(message)
    if task is None or isinstance(message, Trajectory):
        raise NotRedrivable(f"a {message.wire_type()} is no work that a stage could do again")
    wrong = flaw(task)
    if wrong is not None:
        raise NotRedrivable(f"its task is as invalid now: {wrong}")
    return task


def _refuse_cancelled(tasks: Sequence[Task], cancels: Cancels) -> None:
    for task in tasks:
        cancel = cancels.of(task.run, task.group, task.sample)
        if cancel is not None:
            raise NotRedrivable(
                f"{cancel.target} is cancelled ({cancel.cause}): its samples would end as cancelled, and a cancel "
                f"stays until the run's last deadline; publish its tasks under a new run name"
            )


def siblings(task: Task, *, start_by_ms: int) -> list[Task]:
    """Return the group that does a task's work again.

    Raises:
        NotRedrivable: the group is too large.
    """
    if task.samples > MAX_SIBLINGS:
        raise NotRedrivable(f"its group claims {task.samples} siblings; at most {MAX_SIBLINGS} are published at once")
    visit = min(task.visit + 1, TASK_RANGES["visit"][1])
    group = group_id(task.run, redriven_place(task.source, task.group), visit, task.row, task.payload)
    return [
        msgspec.structs.replace(
            task,
            group=group,
            sample=sample,
            attempt=0,
            visit=visit,
            admission=None,
            start_by_ms=start_by_ms,
            redrive_of=task.group,
        )
        for sample in range(task.samples)
    ]
