"""Which groups are trained on: a pure function of (log prefix, rules, earlier decisions).

Fed with the run's terminal records in offset order, one at a time. A group is complete with the record that ends its
last sibling; it is then kept, or dropped for a reason. Step k is decided at the first offset at which enough unused
kept groups are complete, and holds exactly those, sorted by admission (those of foreign producers after them, by
first offset). Under `late = wait` it is held for groups that it must not leave behind (`pacing.py`); then the lowest of
the kept ones are taken, and more than one step may become due at one offset. How far ahead the consumer has read, and
what time it is, never matter.

    feed(record) -> [Dropped]          the record completed a group that is not trained on
                    [Step]             the record completed the batch of the next step
                    [Dropped, Step]    the next step had waited for that group, or must do with fewer now
                    []                 anything else
    due()        -> [Step] or []       another step at the same offset; asked for once the one before it is made

A `Script` holds what was already decided after the state that the assembler begins with; it is obeyed, whatever the
rules say now, and its events come marked `recorded`. Until its steps are made again the rules of the trainers that
decided them hold. A group is judged by its lag at the step for which it was complete, however often it is read again:
under `late = wait` one of a foreign producer may outlast steps. The state between two events is small
(`AssemblerState`): with it and the log from its `low` on, another assembler goes on exactly here. Nothing here does I/O
or knows tokens.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from infra.errors import RollmillError
from schemas.arbiter import Arbiter, Ruling
from schemas.batch import batch_digest
from schemas.decisions import DropReason, Member, SampleRef, StepDecided
from schemas.message import Part
from trainer.advantages import Advantages, advantage_digest, step_advantages
from trainer.algorithm_config import Late
from trainer.curriculum import PhaseState
from trainer.group import Group, OpenGroup
from trainer.pacing import Pacing, PacingState
from trainer.rules import GroupRules, reason_to_drop
from trainer.shuffle import shuffled
from trainer.terminal import OTHER_RUN, Terminal

log = logging.getLogger(__name__)

UNKNOWN_LAG = 1 << 30
"""Lag of a token whose version no decision names: beyond every limit."""


class ScriptBroken(RollmillError):
    """A recorded step cannot be made again from the log."""


class Script(NamedTuple):
    """Decisions that were written down after the state an assembler begins with."""

    steps: Mapping[int, StepDecided] = {}
    """Step number -> the decision."""
    rules: Mapping[int, GroupRules] = {}
    """Step number -> the rules by which it was decided; those of the assembler if it is not here."""
    judged: Mapping[str, GroupRules] = {}
    """Group -> the rules by which it is kept or dropped; those of the next step if it is not here."""
    drops: Mapping[str, DropReason] = {}
    """Group -> why it was dropped."""
    closed_from: Mapping[str, int] = {}
    """Group of a step that was undone -> steps after which it is closed."""


class AssemblerState(Part, frozen=True, kw_only=True):
    """What must be remembered to go on deciding; the rest is in the log from `low` on."""

    low: int
    """Lowest offset of an accepted record of an undecided group, else the next offset."""
    position: int
    """Next offset after the last record that was fed."""
    steps: int
    """Steps decided."""
    closed: tuple[str, ...] = ()
    """Groups that are decided."""
    resolved: int = 0
    """Decided groups that the feeder admitted."""
    recent: tuple[float, ...] = ()
    """Mean success of the last complete groups, oldest first."""
    phases: PhaseState = PhaseState()
    """Where the run is in a curriculum by success."""
    kept: tuple[tuple[str, int], ...] = ()
    """Groups that wait for their step, and the steps that were decided when each was judged."""
    pacing: PacingState | None = None
    """Admission numbers on their way; none in a checkpoint of a trainer that did not count them."""

    @classmethod
    def fresh(cls, start: int) -> Self:
        """Return the state before the first record of a run whose records begin at an offset."""
        return cls(low=start, position=start, steps=0)


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A complete group is not trained on."""

    group: Group
    """The group."""
    reason: DropReason
    """Why."""
    position: int
    """Next offset after the record that completed it."""
    recorded: bool
    """The decision is already in the log."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The next trainer step is decided."""

    number: int
    """Number of the step, from 1."""
    groups: tuple[Group, ...]
    """Its groups in order."""
    advantages: tuple[Advantages, ...]
    """Those of each member, in the members' order; none where they need the model."""
    position: int
    """Next offset after the record that completed the batch."""
    buffered: tuple[SampleRef, ...]
    """Accepted completed records that no decision has used yet."""
    missing: int
    """Groups fewer than the rules ask for."""
    phase: int | None = None
    """Phase of the curriculum for groups that are admitted after it; none where the number of steps says it."""
    recorded: StepDecided | None
    """The decision, if it is already in the log."""

    @property
    def terminals(self) -> tuple[Terminal, ...]:
        """Its samples in order."""
        return tuple(t for group in self.groups for t in group.completed)

    @property
    def members(self) -> tuple[Member, ...]:
        """Its samples in order, as they are written down."""
        return tuple(t.member for t in self.terminals)

    @property
    def digest(self) -> str:
        """What makes two batches the same."""
        return batch_digest(self.members)

    @property
    def advantage_digest(self) -> str:
        """What makes their advantages the same; empty where they need the model."""
        return advantage_digest(self.advantages)


Event = Dropped | Step


class GroupAssembler:
    """Turns terminal records into decisions."""

    def __init__(
        self,
        rules: GroupRules,
        state: AssemblerState,
        *,
        script: Script | None = None,
        versions: Mapping[int, int] | None = None,
    ) -> None:
        """Go on from a state; the caller feeds the log from `state.low`.

        Args:
            rules: what new decisions depend on.
            state: where to go on.
            script: decisions made after that state.
            versions: version -> step that made it, as far as known; `published` adds to it.
        """
        self.rules = rules
        self.position = state.low
        self.steps = state.steps
        self.resolved = state.resolved
        self.versions = dict(versions or {})
        self.recent: deque[float] = deque(state.recent, maxlen=rules.recent)
        self.dropped = 0
        """Groups dropped since the last step."""
        self._decides_from = state.position
        self._script = script or Script()
        self._scripted = {m.group for step in self._script.steps.values() for m in step.members}
        self._closed = dict.fromkeys(state.closed)
        self._open: dict[str, OpenGroup] = {}
        self._kept: dict[str, Group] = {}
        self._judged_at = dict(state.kept)
        """Group -> steps that were decided when it was judged, of those that are kept or were."""
        self._arbiter = Arbiter()
        # What an older trainer gave out was not counted: nothing of it is waited for.
        given_out = self.resolved + (self._now.max_lag + 1) * self._now.groups
        self._phases = state.phases
        self._pacing = Pacing(state.pacing or PacingState(lowest=given_out if state.steps else 0))

    def published(self, version: int, step: int) -> None:
        """Learn which step made a version of the weights."""
        self.versions[version] = step

    @property
    def catching_up(self) -> bool:
        """Tell whether recorded steps are still to be made again."""
        return self.steps + 1 in self._script.steps

    @property
    def caught_up(self) -> bool:
        """Tell whether everything that was decided before has been read and made again."""
        return self.position >= self._decides_from and not self.catching_up

    @property
    def _now(self) -> GroupRules:
        """The rules by which the next step is decided."""
        return self._script.rules.get(self.steps + 1, self.rules)

    @property
    def phase(self) -> int | None:
        """The phase of the curriculum now; none where the number of steps says it."""
        return None if self._now.phases is None else self._phases.phase

    @property
    def kept(self) -> int:
        """Complete groups that wait for their step."""
        return len(self._kept)

    @property
    def open_groups(self) -> int:
        """Groups some of whose siblings have ended."""
        return len(self._open)

    @property
    def seen(self) -> int:
        """Groups of the feeder at least one of whose siblings has ended."""
        waiting = sum(group.admission is not None for group in self._kept.values())
        begun = sum(any(t.admission is not None for t in group.records.values()) for group in self._open.values())
        return self.resolved + waiting + begun

    def missing(self) -> dict[str, tuple[int, ...]]:
        """Return the siblings that have not ended of each group that is begun, the oldest group first."""
        return {
            name: tuple(sample for sample in range(group.size) if sample not in group.records)
            for name, group in self._open.items()
        }

    def lag(self, version: int) -> int:
        """Return how many steps lie between a version and the weights that the next step trains."""
        if version == OTHER_RUN:
            return self.rules.max_lag if self.rules.replayed else UNKNOWN_LAG
        made_by = self.versions.get(version)
        return UNKNOWN_LAG if made_by is None else self.steps - made_by

    def lag_at_use(self, version: int) -> int:
        """Return the same for the step that was decided last: to the weights that it begins with."""
        return self.lag(version) - (version != OTHER_RUN)

    def state(self) -> AssemblerState:
        """Return what must be remembered now."""
        kept = [group.first for group in self._kept.values()]
        waiting = [t.offset for group in self._open.values() for t in group.records.values()]
        return AssemblerState(
            low=min(kept + waiting, default=self.position),
            position=self.position,
            steps=self.steps,
            closed=tuple(self._closed),
            resolved=self.resolved,
            recent=tuple(self.recent),
            phases=self._phases,
            kept=tuple((group, self._judged_at[group]) for group in self._kept),
            pacing=self._pacing.state(),
        )

    def buffered(self) -> tuple[SampleRef, ...]:
        """Return the accepted completed records that no decision has used, by offset."""
        kept = [t for group in self._kept.values() for t in group.completed]
        waiting = [t for group in self._open.values() for t in group.records.values() if t.completed]
        return tuple(t.ref for t in sorted(kept + waiting, key=lambda t: t.offset))

    def feed(self, record: Terminal) -> list[Event]:
        """Take the next record of the run and return what it decides.

        Raises:
            ScriptBroken: the log no longer holds what a recorded step was made of.
        """
        if record.offset < self.position:
            raise ValueError(f"record at offset {record.offset} after position {self.position}: feed in offset order")
        self.position = record.offset + 1
        if record.group in self._closed or not self._accepts(record):
            return []
        self._pacing.meet(record.admission)
        group = self._open.setdefault(record.group, OpenGroup(record.samples))
        group.records[record.sample] = record
        if len(group.records) < group.size:
            return []
        del self._open[record.group]
        complete, seed = group.close(record.group), self._now.shuffle_seed
        return self._complete(complete if seed is None else shuffled(complete, seed))

    def _accepts(self, record: Terminal) -> bool:
        ruling = self._arbiter.rule(record.group, record.sample, record.digest, record.offset)
        if ruling is Ruling.CONFLICT:
            log.warning("offset %d: group %s has another task's digest; ignored", record.offset, record.group)
        return ruling is Ruling.ACCEPTED

    def due(self) -> list[Event]:
        """Return the next step if no record is needed for it: only a step that was held leaves enough groups behind."""
        waits = self._now.late is Late.WAIT
        return self._step_if_due() if waits and self.position >= self._decides_from else []

    def waits_for(self, record: Terminal) -> bool:
        """Tell whether a record's group is begun, or complete, and not decided."""
        return record.group in self._open or record.group in self._kept

    def _complete(self, group: Group) -> list[Event]:
        # Groups that were complete before the state was taken are read again, and were counted then.
        again = self.position <= self._decides_from
        if group.completed and not again:
            self._count(group)
        dropped: list[Event] = []
        if self._is_undone(group.id):
            self._close(group)
        elif (reason := self._reason_to_drop(group)) is None:
            self._kept[group.id] = group
            self._judged_at.setdefault(group.id, self.steps)
        else:
            self._close(group)
            self.dropped += 1
            recorded = group.id in self._script.drops
            dropped.append(Dropped(group=group, reason=reason, position=self.position, recorded=recorded))
        self._give(self._now)
        # Where no step waits for a group and none may be short, only a kept group can make one due.
        by_any = self._now.late is Late.WAIT or self._now.most_dropped is not None
        if again or not (by_any or group.id in self._kept):
            return dropped
        return [*dropped, *self._step_if_due()]

    def _count(self, group: Group) -> None:
        self.recent.append(group.success)
        if self._now.phases is not None and group.admission is not None:
            self._phases = self._phases.met(group.phase, group.success, self._now.phases)

    def _is_undone(self, group: str) -> bool:
        """Tell whether a group was used by a step that was undone, and the step that it was undone from is made."""
        closed_from = self._script.closed_from.get(group)
        return closed_from is not None and self.steps >= closed_from

    def _reason_to_drop(self, group: Group) -> DropReason | None:
        if group.id in self._script.drops:
            return self._script.drops[group.id]
        if group.id in self._scripted:
            return None
        later = self.steps - self._judged_at.get(group.id, self.steps)
        return reason_to_drop(
            group, self._script.judged.get(group.id, self._now), lambda version: self._lag_before(version, later)
        )

    def _lag_before(self, version: int, steps: int) -> int:
        """Return what the lag was so many steps ago."""
        return self.lag(version) - (0 if version == OTHER_RUN else steps)

    def _step_if_due(self) -> list[Event]:
        recorded = self._script.steps.get(self.steps + 1)
        if recorded is not None:
            return self._scripted_step(recorded)
        self._give(self._now)
        size = self._size_of_step()
        chosen = sorted(self._kept.values(), key=lambda g: g.order)[:size]
        return [self._step(chosen, None)] if size and not self._must_wait(chosen) else []

    def _size_of_step(self) -> int:
        """Return how many groups the next step has if it is decided now; 0 if there are not enough."""
        rules = self._now
        if len(self._kept) >= rules.groups:
            return rules.groups
        too_many = rules.most_dropped is not None and self.dropped >= rules.most_dropped
        return len(self._kept) if too_many else 0

    def _must_wait(self, chosen: list[Group]) -> bool:
        rules = self._now
        if rules.late is not Late.WAIT:
            return False
        numbers = {group.admission for group in chosen}
        return self._pacing.must_wait(
            self.steps + 1,
            {number for number in numbers if number is not None},
            {group.admission for group in self._kept.values() if group.admission is not None},
            groups=rules.groups,
            max_lag=rules.max_lag,
            foreign=None in numbers,
        )

    def _scripted_step(self, recorded: StepDecided) -> list[Event]:
        if self.position < recorded.position:
            return []
        names = dict.fromkeys(member.group for member in recorded.members)
        missing = [name for name in names if name not in self._kept]
        if self.position > recorded.position or missing:
            raise ScriptBroken(
                f"step {recorded.step} was decided at position {recorded.position} of `trajectories`; at "
                f"{self.position} the groups {missing or 'named'} are not complete. The log was changed or cut; "
                f"restore it, or start a new run."
            )
        return [self._step([self._kept[name] for name in names], recorded)]

    def _step(self, groups: list[Group], recorded: StepDecided | None) -> Step:
        rules = self._now
        self.steps += 1
        self.dropped = 0
        undone = [group for group in self._kept.values() if self._is_undone(group.id)]
        for group in (*groups, *undone):
            del self._kept[group.id]
            self._close(group)
        self._give(rules)
        values = step_advantages([group.completed for group in groups], rules.estimator, std=rules.std)
        return Step(
            number=self.steps,
            groups=tuple(groups),
            advantages=values,
            position=self.position,
            buffered=self.buffered(),
            missing=recorded.missing if recorded else rules.groups - len(groups),
            phase=self._next_phase(rules, recorded),
            recorded=recorded,
        )

    def _next_phase(self, rules: GroupRules, recorded: StepDecided | None) -> int | None:
        """Return the phase after a step was decided."""
        if recorded is not None and recorded.phase is not None:
            self._phases = self._phases.at(recorded.phase, self.steps)
            return recorded.phase
        if rules.phases is None:
            return None
        self._phases = self._phases.decided(self.steps, rules.phases)
        return self._phases.phase

    def _close(self, group: Group) -> None:
        self._closed[group.id] = None
        self._judged_at.pop(group.id, None)
        self._arbiter.close(group.id)  # what ended it is not asked for again
        self.resolved += group.admission is not None
        self._pacing.decide(group.admission)

    def _give(self, rules: GroupRules) -> None:
        """Count what the credit gives out now, by the rules of whoever decides."""
        self._pacing.give(self.steps, self.resolved + (rules.max_lag + 1) * rules.groups)
