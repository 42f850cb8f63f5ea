"""What a run would have trained on under other rules, over the trajectories that it recorded.

The log is fed through the same group assembler with some rules changed, and what comes out is put beside what was
decided. Nothing is sampled anew, so this tells what the rules make of *these* outcomes: a policy that had trained on
other batches would have sampled others. Versions keep the step that made them, so the lag of a token is that of the
recorded run as long as steps keep pace with it. Groups of steps that a branch has undone are left out. Nothing is
written.
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
from trainer.config import AlgorithmConfig, synchronous
from trainer.decision_log import read_started
from trainer.groups import AssemblerState, Dropped, GroupAssembler, Script, Step
from trainer.history import History, stop_of
from trainer.replay import read_terminals, shaped
from trainer.rules import GroupRules
from trainer.terminal import Terminal


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
    """Rule -> (recorded, changed)."""
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
    before = AlgorithmConfig.model_validate(history.config["algorithm"])
    after = changed_rules(before, overrides)
    steps, drops = history.steps.values(), history.drops.values()
    end = max([start, *(step.position for step in steps), *(drop.position for drop in drops)])
    records = await read_terminals(bus, clock, run, start, end)
    recorded, changed = (_decided(history, records, rules) for rules in (before, after))
    pairs = zip(recorded.steps, changed.steps, strict=False)
    return WhatIf(
        run=run,
        rules={name: (value, getattr(after, name)) for name, value in before if value != getattr(after, name)},
        recorded=recorded.outcome(),
        changed=changed.outcome(),
        first_other_step=next((ours.number for ours, theirs in pairs if ours.digest != theirs.digest), None),
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
            success=sum(terminal.success for terminal in trained) / len(trained) if trained else 0.0,
        )


def _decided(history: History, records: Sequence[Terminal], rules: AlgorithmConfig) -> _Decided:
    start = history.start or 0
    assembler = GroupAssembler(
        GroupRules.of(rules, stop_of(history.config)),
        AssemblerState.fresh(start),
        script=Script(closed_from=dict.fromkeys(history.closed_from, 0)),
        versions=history.made_by,
    )
    found = _Decided([], Counter())
    for record in records:
        events = assembler.feed(shaped(record, rules))
        while events:
            for event in events:
                match event:
                    case Step():
                        found.steps.append(event)
                    case Dropped():
                        found.dropped[event.reason.value] += 1
            events = assembler.due()
    return found
