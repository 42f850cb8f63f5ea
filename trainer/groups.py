"""Which groups are trained on: a pure function of (log prefix, rules, earlier decisions).

Fed with the run's terminal records in offset order, one at a time. A group is complete with the record that ends its
last sibling; it is then kept, or dropped for a reason. Step k is decided at the first offset at which enough unused
kept groups are complete, and holds exactly those, sorted by admission (those of foreign producers after them, by
first offset). How far ahead the consumer has read, and what time it is, never matter.

    feed(record) -> [Dropped]          the record completed a group that is not trained on
                    [Step]             the record completed the batch of the next step
                    []                 anything else

A `Script` holds what was already decided after the state that the assembler begins with; it is obeyed, whatever the
rules say now, and its events come marked `recorded`. The state between two events is small (`AssemblerState`): with it
and the log from its `low` on, another assembler goes on exactly here. Nothing here does I/O or knows tokens.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from infra.errors import RollmillError
from schemas.arbiter import Arbiter, Ruling
from schemas.batch import batch_digest
from schemas.decisions import DropReason, Member, SampleRef, StepDecided
from schemas.message import Part
from trainer.advantages import Advantages, advantage_digest, step_advantages
from trainer.config import AlgorithmConfig, Estimator, Filter
from trainer.terminal import Terminal

log = logging.getLogger(__name__)

VARIANCE_TOLERANCE = 1e-6
"""Siblings differ if their largest and smallest value are further apart than this."""

UNKNOWN_LAG = 1 << 30
"""Lag of a token whose version no decision names: beyond every limit."""


class ScriptBroken(RollmillError):
    """A recorded step cannot be made again from the log."""


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """What the decisions depend on."""

    groups: int
    """Groups in one step."""
    siblings_needed: int
    """Fewest completed siblings of a group that is trained on."""
    filter: Filter
    """What must differ between siblings."""
    max_lag: int
    """Tokens with a larger lag are not trained on."""
    estimator: Estimator
    """How rewards become advantages."""
    std: bool
    """Divide by the standard deviation."""
    recent: int = 64
    """Complete groups in the mean success."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, recent: int = 64) -> GroupRules:
        """Return the rules that a configuration states."""
        return cls(
            groups=algorithm.groups,
            siblings_needed=algorithm.siblings_needed,
            filter=algorithm.filter,
            max_lag=algorithm.max_lag,
            estimator=algorithm.estimator,
            std=algorithm.std,
            recent=recent,
        )


class Script(NamedTuple):
    """Decisions that were written down after the state an assembler begins with."""

    steps: Mapping[int, StepDecided] = {}
    """Step number -> the decision."""
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


@dataclass(frozen=True, kw_only=True)
class Group:
    """A complete group."""

    id: str
    """The group."""
    admission: int | None
    """The feeder's number; none if foreign."""
    first: int
    """Offset of its first accepted record."""
    completed: tuple[Terminal, ...]
    """Graded siblings by sample number: the baseline and the batch."""
    excluded: int
    """Siblings that failed, expired or were cancelled: in neither."""

    @property
    def order(self) -> tuple[int, int, str]:
        """Its place in a batch."""
        return (0, self.admission, self.id) if self.admission is not None else (1, self.first, self.id)

    @property
    def success(self) -> float:
        """Mean success of the graded siblings."""
        return float(np.mean([t.success for t in self.completed])) if self.completed else 0.0


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


@dataclass
class _Open:
    """A group some of whose siblings have ended."""

    size: int
    records: dict[int, Terminal] = field(default_factory=dict)

    def close(self, group: str) -> Group:
        ordered = [self.records[sample] for sample in sorted(self.records)]
        completed = tuple(t for t in ordered if t.completed)
        first = min(ordered, key=lambda t: t.offset)
        return Group(
            id=group,
            admission=first.admission,
            first=first.offset,
            completed=completed,
            excluded=len(ordered) - len(completed),
        )


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
        self._decides_from = state.position
        self._script = script or Script()
        self._scripted = {m.group for step in self._script.steps.values() for m in step.members}
        self._closed = dict.fromkeys(state.closed)
        self._open: dict[str, _Open] = {}
        self._kept: dict[str, Group] = {}
        self._arbiter = Arbiter()

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
        made_by = self.versions.get(version)
        return UNKNOWN_LAG if made_by is None else self.steps - made_by

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
        group = self._open.setdefault(record.group, _Open(record.samples))
        group.records[record.sample] = record
        if len(group.records) < group.size:
            return []
        del self._open[record.group]
        return self._complete(group.close(record.group))

    def _accepts(self, record: Terminal) -> bool:
        ruling = self._arbiter.rule(record.group, record.sample, record.digest, record.offset)
        if ruling is Ruling.CONFLICT:
            log.warning("offset %d: group %s has another task's digest; ignored", record.offset, record.group)
        return ruling is Ruling.ACCEPTED

    def _complete(self, group: Group) -> list[Event]:
        # Groups that were complete before the state was taken are read again, and were counted then.
        again = self.position <= self._decides_from
        if group.completed and not again:
            self.recent.append(group.success)
        if self._is_undone(group.id):
            self._close(group)
            return []
        reason = self._reason_to_drop(group)
        if reason is None:
            self._kept[group.id] = group
            return [] if again else self._step_if_due()
        self._close(group)
        recorded = group.id in self._script.drops
        return [Dropped(group=group, reason=reason, position=self.position, recorded=recorded)]

    def _is_undone(self, group: str) -> bool:
        """Tell whether a group was used by a step that was undone, and the step that it was undone from is made."""
        closed_from = self._script.closed_from.get(group)
        return closed_from is not None and self.steps >= closed_from

    def _reason_to_drop(self, group: Group) -> DropReason | None:
        if group.id in self._script.drops:
            return self._script.drops[group.id]
        if group.id in self._scripted:
            return None
        if len(group.completed) < self.rules.siblings_needed:
            return DropReason.INCOMPLETE
        if not varies(group, self.rules.filter):
            return DropReason.NO_VARIANCE
        # A kept group always belongs to the next step, so its lag at use is known when it is complete.
        spans = (span for t in group.completed for span in t.sampled)
        if not any(tokens and self.lag(version) <= self.rules.max_lag for version, tokens in spans):
            return DropReason.STALE
        return None

    def _step_if_due(self) -> list[Event]:
        recorded = self._script.steps.get(self.steps + 1)
        if recorded is not None:
            return self._scripted_step(recorded)
        if len(self._kept) < self.rules.groups:
            return []
        chosen = sorted(self._kept.values(), key=lambda g: g.order)[: self.rules.groups]
        return [self._step(chosen, None)]

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
        self.steps += 1
        undone = [group for group in self._kept.values() if self._is_undone(group.id)]
        for group in (*groups, *undone):
            del self._kept[group.id]
            self._close(group)
        return Step(
            number=self.steps,
            groups=tuple(groups),
            advantages=step_advantages([group.completed for group in groups], self.rules.estimator, std=self.rules.std),
            position=self.position,
            buffered=self.buffered(),
            recorded=recorded,
        )

    def _close(self, group: Group) -> None:
        self._closed[group.id] = None
        self._arbiter.close(group.id)  # what ended it is not asked for again
        self.resolved += group.admission is not None


def varies(group: Group, rule: Filter) -> bool:
    """Tell whether the graded siblings differ in what the rule looks at."""
    match rule:
        case Filter.OFF:
            return True
        case Filter.SUCCESS:
            values = [t.success for t in group.completed]
        case Filter.REWARD:
            values = [t.reward for t in group.completed]
    return max(values, default=0.0) - min(values, default=0.0) > VARIANCE_TOLERANCE
