"""What a run would have trained on under other rules, over the trajectories that it recorded.

The log is fed through the same group assembler with some rules changed, and what comes out is put beside what was
decided. Nothing is sampled anew, so this tells what the rules make of *these* outcomes: a policy that had trained on
other batches would have sampled others. Versions keep the step that made them, so the lag of a token is that of the
recorded run as long as steps keep pace with it. A run that was resumed had the rules of several trainers: each rule
that is changed is changed in all of them, the others hold for the steps and groups that they held for. Groups of steps
that a branch has undone are left out, and drops beside those steps stay if they were by lag. Nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from infra.bus import Bus
from infra.clock import Clock
from infra.errors import ConfigError
from infra.settings import apply_override, explain, given_by, unknown
from schemas.decisions import DropReason
from trainer.algorithm_config import AlgorithmConfig, synchronous
from trainer.decision_log import read_started
from trainer.groups import AssemblerState, Dropped, GroupAssembler, Script, Step
from trainer.history import History, algorithm_of, stop_of
from trainer.replay import read_terminals, shaped
from trainer.rules import GroupRules
from trainer.terminal import Terminal

BY_LAG = {DropReason.STALE, DropReason.LATE}
"""Reasons that rest on the steps made when a group was complete."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What some rules make of a log."""

    steps: int
    """Trainer steps."""
    groups: int
    """Groups in them."""
    samples: int
    """Samples in them."""
    dropped: Mapping[str, int]
    """Complete groups that no step holds, by reason."""
    success: float
    """Mean success of the trained samples."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """What was decided beside what would have been."""

    run: str
    """The run."""
    rules: Mapping[str, tuple[Any, Any]]
    """Rule -> (recorded, changed); where a resumed run had several values, all of them in order, as a tuple."""
    recorded: Outcome
    """What the trainer decided."""
    changed: Outcome
    """What it would have decided."""
    first_other_step: int | None
    """The first step that holds another batch; none if every step of the shorter one is the same."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


async def what_if(bus: Bus, clock: Clock, run: str, overrides: Sequence[str]) -> WhatIf:
    """Decide a run's trajectories by other rules.

    Args:
        bus: the log.
        clock: for the limits of reading.
        run: the run.
        overrides: `rule=value`, keys of `[algorithm]`.

    Raises:
        ConfigError: no trainer ever started on the run, or a rule is unknown or cannot be so.
    """
    history, start = await read_started(bus, clock, run)
    deciding = _deciding(history)
    before = [algorithm_of(history.started[epoch].config) for epoch in deciding]
    after = [changed_rules(rules, overrides) for rules in before]
    steps, drops = history.steps.values(), history.drops.values()
    end = max([start, *(step.position for step in steps), *(drop.position for drop in drops)])
    records = await read_terminals(bus, clock, run, start, end)
    changed = _decided(history, records, dict(zip(deciding, after, strict=True)))
    pairs = zip((history.steps[number] for number in sorted(history.steps)), changed.steps, strict=False)
    return WhatIf(
        run=run,
        rules=_differences(before, after),
        recorded=_recorded(history, records),
        changed=changed.outcome(),
        first_other_step=next((ours.step for ours, theirs in pairs if ours.digest != theirs.digest), None),
    )


def require_rules(overrides: Sequence[str]) -> None:
    """Raise ConfigError for what names no rule at all, whatever run it is for; no log is needed to say so."""
    for override in overrides:
        given: dict[str, Any] = {}
        apply_override(given, override)
        for name in given.keys() - AlgorithmConfig.model_fields.keys():
            raise ConfigError(f"--set {name}: {unknown(AlgorithmConfig, (name,))}")


def changed_rules(rules: AlgorithmConfig, overrides: Sequence[str]) -> AlgorithmConfig:
    """Return rules with some of them changed.

    Raises:
        ConfigError: a rule is unknown or cannot be so.
    """
    values = rules.model_dump(mode="json")
    for override in overrides:
        apply_override(values, override)
    try:
        changed = AlgorithmConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            explain(error, "the rules of the run", AlgorithmConfig, given_by("--set", overrides))
        ) from error
    return synchronous(changed) if changed.max_lag != rules.max_lag else changed


def _deciding(history: History) -> list[int]:
    """Return the epochs whose trainers decided something, oldest first; the last one if none did."""
    decided = {step.epoch for step in history.steps.values()} | {drop.epoch for drop in history.drops.values()}
    return sorted(decided) or [max(history.started)]


def _differences(before: Sequence[AlgorithmConfig], after: Sequence[AlgorithmConfig]) -> dict[str, tuple[Any, Any]]:
    """Return the rules that differ anywhere, each as it was and as it would have been."""
    sides = {name: tuple([getattr(one, name) for one in side] for side in (before, after)) for name, _ in before[0]}
    return {name: (_values(then), _values(now)) for name, (then, now) in sides.items() if then != now}


def _values(values: Sequence[Any]) -> Any:
    """Return the one value that all trainers had, or else each one's in order, repeats left out."""
    found = tuple(value for value, before in zip(values, [object(), *values], strict=False) if value != before)
    return found if len(found) > 1 else found[0]


def _recorded(history: History, records: Sequence[Terminal]) -> Outcome:
    """Return what is written down: no rule is asked."""
    members = [member for step in history.steps.values() for member in step.members]
    success = {record.offset: record.success for record in records}
    return Outcome(
        steps=len(history.steps),
        groups=len({member.group for member in members}),
        samples=len(members),
        dropped=dict(Counter(drop.reason.value for drop in history.drops.values())),
        success=_mean([success[member.offset] for member in members if member.offset in success]),
    )


@dataclass(frozen=True)
class _Decided:
    """Every decision that some rules make over a log."""

    steps: list[Step]
    dropped: Counter[str]

    def outcome(self) -> Outcome:
        """Return the figures."""
        trained = [terminal for step in self.steps for terminal in step.terminals]
        return Outcome(
            steps=len(self.steps),
            groups=sum(len(step.groups) for step in self.steps),
            samples=len(trained),
            dropped=dict(self.dropped),
            success=_mean([terminal.success for terminal in trained]),
        )


def _decided(history: History, records: Sequence[Terminal], algorithms: Mapping[int, AlgorithmConfig]) -> _Decided:
    """Return what is decided if the trainers of a run had other rules.

    Args:
        history: what was decided.
        records: the outcomes.
        algorithms: epoch -> its trainer's rules, the oldest first.
    """
    last = list(algorithms.values())[-1]
    rules = {
        epoch: GroupRules.of(algorithm, stop_of(history.started[epoch].config))
        for epoch, algorithm in algorithms.items()
    }
    assembler = GroupAssembler(
        list(rules.values())[-1],
        AssemblerState.fresh(history.start or 0),
        script=_script(history, rules),
        versions=history.made_by,
    )
    found = _Decided([], Counter())
    for record in records:
        events = assembler.feed(shaped(record, last))  # what punishes length is the same for all trainers of a run
        while events:
            for event in events:
                match event:
                    case Step():
                        found.steps.append(event)
                    case Dropped():
                        found.dropped[event.reason.value] += 1
            events = assembler.due()
    return found


def _script(history: History, rules: Mapping[int, GroupRules]) -> Script:
    """Return whose rules hold where: those of the trainer that decided a step or a group.

    A trainer that takes over judges the groups again that wait for their step, so a group is not always judged by the
    rules of the step that was next when it was complete.
    """
    steps, drops = history.steps.values(), history.drops.values()
    return Script(
        rules={step.step: rules[step.epoch] for step in steps},
        judged={
            **{member.group: rules[step.epoch] for step in steps for member in step.members},
            **{drop.group: rules[drop.epoch] for drop in drops},
        },
        drops={drop.group: drop.reason for drop in drops if drop.group in history.settled and drop.reason in BY_LAG},
        closed_from=dict.fromkeys(history.closed_from, 0),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
