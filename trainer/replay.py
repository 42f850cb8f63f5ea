"""Replay from the trainer: make every recorded step again from the log, and compare digests.

Reads `decisions` and `trajectories` of a run, nothing else: no control record, no file, no clock, no tensors. A step
is equal if the batch and its advantages are the same to the bit, decided at the same position; advantages that need
the model (PPO) have no digest and are not compared, which the report says. After a step that differs, replay goes on
from what was recorded, so that each step is judged for itself. When a run was resumed with other rules, the drops of
the trainer before are obeyed, as the trainer that resumed did. Steps that a branch has undone are not made again; their
groups are closed from the branch on, and drops decided beside them are obeyed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infra.bus import Bus
from infra.clock import Clock
from infra.trajectories import read_run
from schemas.batch import batch_digest
from schemas.decisions import DropReason, StepDecided
from trainer.advantages import soft_overlong
from trainer.algorithm_config import AlgorithmConfig
from trainer.curriculum import PhaseState
from trainer.decision_log import read_started
from trainer.evidence import Evidence
from trainer.groups import AssemblerState, Dropped, GroupAssembler, Script, Step
from trainer.history import History, algorithm_of, rules_of
from trainer.pacing import Pacing, PacingState
from trainer.terminal import Terminal, terminal


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """One recorded step against the same step made again."""

    step: int
    """Number of the step."""
    recorded: str
    """Batch digest in the log."""
    found: str
    """Batch digest made again; empty if no step was decided."""
    cause: str
    """What differs first; empty if nothing does."""
    by_model: bool = False
    """A model made its advantages, so that only the batch is compared."""

    @property
    def equal(self) -> bool:
        """Tell whether nothing differs."""
        return not self.cause


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """What replay found."""

    run: str
    """The run."""
    steps: tuple[StepComparison, ...]
    """Each recorded step, or the last ones that were asked for."""
    drops: int
    """Groups dropped before the last step, as recorded."""
    other_drops: tuple[str, ...]
    """Groups whose drop is recorded and was not found again, or the reverse."""

    @property
    def equal(self) -> int:
        """Steps that are equal."""
        return sum(step.equal for step in self.steps)

    @property
    def all_equal(self) -> bool:
        """Tell whether steps and drops are all the same."""
        return self.equal == len(self.steps) and not self.other_drops

    @property
    def first_difference(self) -> StepComparison | None:
        """The first step that differs."""
        return next((step for step in self.steps if not step.equal), None)

    @property
    def not_compared(self) -> int:
        """Steps whose advantages were made by a model, which replay does not run."""
        return sum(step.by_model for step in self.steps)

    def summary(self) -> str:
        """Return one line for a person."""
        line = f"{self.equal}/{len(self.steps)} digests equal"
        if self.not_compared:
            line += f" ({self.not_compared} with advantages made by a model, which are not compared)"
        if self.first_difference is not None:
            return f"{line}; first difference at step {self.first_difference.step}: {self.first_difference.cause}"
        if self.other_drops:
            return f"{line}; {len(self.other_drops)} dropped groups differ, first {self.other_drops[0]}"
        return line

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        first = self.first_difference
        return {
            "run": self.run,
            "equal": self.equal,
            "total": len(self.steps),
            "all_equal": self.all_equal,
            "advantages_not_compared": self.not_compared,
            "first_difference": {"step": first.step, "cause": first.cause} if first else None,
            "drops": self.drops,
            "other_drops": list(self.other_drops),
        }


async def replay(bus: Bus, clock: Clock, run: str, *, last: int | None = None) -> ReplayReport:
    """Make a run's recorded decisions again.

    Args:
        bus: the log.
        clock: for the limits of reading.
        run: the run.
        last: report only this many steps, the last ones; all are made again.

    Raises:
        ConfigError: no trainer ever started on the run.
        infra.errors.OffsetLost: retention has removed the run's first trajectories.
    """
    history, start = await read_started(bus, clock, run)
    end = max((step.position for step in history.steps.values()), default=start)
    records = await read_terminals(bus, clock, run, start, end)
    comparison = _Replay(run, history, records)
    steps = tuple(comparison.steps())
    return ReplayReport(
        run=run,
        steps=steps[-last:] if last is not None else steps,
        drops=len(comparison.recorded_drops),
        other_drops=comparison.other_drops(),
    )


async def read_terminals(bus: Bus, clock: Clock, run: str, start: int, end: int) -> list[Terminal]:
    """Return a run's terminal records in [start, end) of its partition, without tokens and punishments."""
    return [terminal(found, None, keep_tokens=False) async for found in read_run(bus, clock, run, start, end)]


class _Replay:
    """Steps through the records beside the recorded decisions."""

    def __init__(self, run: str, history: History, records: Sequence[Terminal]) -> None:
        self._run = run
        self._history = history
        self._records = records
        self._algorithms = {epoch: algorithm_of(started.config) for epoch, started in history.started.items()}
        self._rules = {epoch: rules_of(started.config) for epoch, started in history.started.items()}
        self._evidence = Evidence()
        for record in records:
            self._evidence.add(record)
        self._start = history.start or 0
        self._next = 0
        self._found_drops: dict[str, DropReason] = {}
        last = max((step.position for step in history.steps.values()), default=0)
        self.recorded_drops = {g: d.reason for g, d in history.drops.items() if d.position <= last}

    def steps(self) -> Iterator[StepComparison]:
        """Make each recorded step again."""
        assembler = self._assembler(AssemblerState.fresh(self._start))
        for number in sorted(self._history.steps):
            recorded = self._history.steps[number]
            algorithm = self._algorithms[recorded.epoch]
            assembler.rules = self._rules[recorded.epoch]
            found = self._advance(assembler, recorded, algorithm)
            cause = difference(found, recorded, assembler, self._evidence)
            yield StepComparison(
                step=number,
                recorded=recorded.digest,
                found=found.digest if found else "",
                cause=cause,
                by_model=algorithm.estimator.needs_model,
            )
            if cause:
                assembler = self._after(recorded, assembler.state().phases)

    def other_drops(self) -> tuple[str, ...]:
        """Return the groups whose drops are not the same in both."""
        return tuple(sorted(g for g, _ in self.recorded_drops.items() ^ self._found_drops.items()))

    def _advance(self, assembler: GroupAssembler, recorded: StepDecided, algorithm: AlgorithmConfig) -> Step | None:
        if (step := next(iter(assembler.due()), None)) is not None:
            assert isinstance(step, Step), "only steps become due without a record"
            return step
        while self._next < len(self._records) and self._records[self._next].offset < recorded.position:
            record = self._records[self._next]
            self._next += 1
            for event in assembler.feed(shaped(record, algorithm)):
                match event:
                    case Step():
                        return event
                    case Dropped():
                        self._found_drops[event.group.id] = event.reason
        return None

    def _after(self, recorded: StepDecided, phases: PhaseState) -> GroupAssembler:
        """Return an assembler that stands where the trainer stood after a recorded step, as far as anybody knows."""
        steps = [s for s in self._history.steps.values() if s.step <= recorded.step]
        closed = {m.group for s in steps for m in s.members}
        closed |= {g for g, d in self._history.drops.items() if d.position <= recorded.position}
        before = [r for r in self._records if r.offset < recorded.position]
        pacing, resolved = self._pacing_after(recorded, before)
        assembler = self._assembler(
            AssemblerState(
                low=self._start,
                position=recorded.position,
                steps=recorded.step,
                closed=tuple(sorted(closed)),
                resolved=resolved,
                phases=phases if recorded.phase is None else phases.at(recorded.phase, recorded.step),
                kept=self._judged_at(before),
                pacing=pacing,
            )
        )
        algorithm = self._algorithms[recorded.epoch]
        for record in before:
            assembler.feed(shaped(record, algorithm))
        self._next = len(before)
        return assembler

    def _judged_at(self, before: Sequence[Terminal]) -> tuple[tuple[str, int], ...]:
        """Return for each complete group the steps that were decided before the record that completed it."""
        missing: dict[str, set[int]] = {}
        completed: dict[str, int] = {}
        for record in before:
            open_ = missing.setdefault(record.group, set(range(record.samples)))
            if record.sample in open_:
                open_.remove(record.sample)
                if not open_:
                    completed[record.group] = record.offset
        positions = [step.position for step in self._history.steps.values()]
        return tuple((group, sum(position <= at for position in positions)) for group, at in completed.items())

    def _pacing_after(self, recorded: StepDecided, before: Sequence[Terminal]) -> tuple[PacingState, int]:
        """Return what the recorded decisions up to a step say of admissions, and how many they resolved."""
        numbers = {r.group: r.admission for r in before if r.admission is not None}
        drops = [(d.position, 0, (d.group,)) for d in self._history.drops.values() if d.position <= recorded.position]
        steps = [
            (s.position, s.step, tuple(dict.fromkeys(m.group for m in s.members)))
            for s in self._history.steps.values()
            if s.step <= recorded.step
        ]
        pacing, resolved, made = Pacing(PacingState(lowest=0)), 0, 0
        for number in numbers.values():
            pacing.meet(number)
        for _, step, groups in sorted([*drops, *steps]):
            rules = self._rules[self._history.steps[made + 1].epoch]
            pacing.give(made, resolved + (rules.max_lag + 1) * rules.groups)
            for group in groups:
                pacing.decide(numbers.get(group))
                resolved += group in numbers
            made = max(made, step)
            pacing.give(made, resolved + (rules.max_lag + 1) * rules.groups)
        return pacing.state(), resolved

    def _assembler(self, state: AssemblerState) -> GroupAssembler:
        first = next(iter(self._rules.values()))
        return GroupAssembler(
            first,
            state,
            script=Script(drops=self._obeyed(), closed_from=self._history.closed_from),
            versions=self._history.made_by,
        )

    def _obeyed(self) -> dict[str, DropReason]:
        """Return the drops that were decided under other rules than the step after them, or beside undone steps."""
        obeyed = {group: self._history.drops[group].reason for group in self._history.settled}
        for group, drop in self._history.drops.items():
            later = [s for s in self._history.steps.values() if s.position >= drop.position]
            step = min(later, key=lambda s: s.step, default=None)
            if step is not None and self._rules[step.epoch] != self._rules[drop.epoch]:
                obeyed[group] = drop.reason
        return obeyed


def shaped(record: Terminal, algorithm: AlgorithmConfig) -> Terminal:
    """Return a record with the punishment of its length."""
    tokens = sum(count for _, count in record.sampled)
    return replace(record, reward=record.reward + soft_overlong(tokens, algorithm.overlong))


def difference(found: Step | None, recorded: StepDecided, assembler: GroupAssembler, evidence: Evidence) -> str:
    """Return what differs first between a step made again and the recorded one; empty if nothing does."""
    if batch_digest(recorded.members) != recorded.digest:
        return "the recorded members do not have the recorded digest: the decision itself was changed"
    cause = _in_step(found, recorded, assembler)
    change = next(evidence.changes(recorded), None) if cause else None
    return f"{change.group}/{change.sample}: {change.what}" if change else cause


def _in_step(found: Step | None, recorded: StepDecided, assembler: GroupAssembler) -> str:
    """Return how the steps differ, whatever became of their records; empty if they do not."""
    if found is None:
        return (
            f"no step is decided up to position {recorded.position}: {assembler.kept} groups are complete and kept, "
            f"{assembler.open_groups} incomplete; records are missing, unreadable or came later"
        )
    if cause := _other_members(found, recorded):
        return cause
    if (found.position, found.phase) != (recorded.position, recorded.phase):
        return _other_place(found, recorded)
    if found.digest != recorded.digest:
        pairs = zip(found.members, recorded.members, strict=True)
        now, then = next((a, b) for a, b in pairs if a != b)
        return (
            f"the same samples in another order: {now.group}/{now.sample} stands where {then.group}/{then.sample} did"
        )
    return "" if found.advantage_digest == recorded.advantage_digest else "the same batch with other advantages"


def _other_place(found: Step, recorded: StepDecided) -> str:
    if found.position != recorded.position:
        return f"decided at position {found.position}, recorded at {recorded.position}"
    return f"phase {found.phase} of the curriculum follows, phase {recorded.phase} was recorded"


def _other_members(found: Step, recorded: StepDecided) -> str:
    ours = {(m.group, m.sample): m for m in found.members}
    theirs = {(m.group, m.sample): m for m in recorded.members}
    if ours.keys() != theirs.keys():
        only = sorted(ours.keys() - theirs.keys())[:1], sorted(theirs.keys() - ours.keys())[:1]
        return f"other samples: only now {only[0]}, only recorded {only[1]}"
    for (group, sample), member in theirs.items():
        for name in ("offset", "content", "reward"):
            before, now = getattr(member, name), getattr(ours[group, sample], name)
            if before != now:
                return f"{name} of {group}/{sample} (offset {member.offset}) was {before}, is {now}"
    return ""
