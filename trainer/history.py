"""What a run has decided so far, read from its `decisions`: pure.

Only live decisions enter (`schemas.decisions.live_decisions`): those of a trainer that was replaced before it wrote
them do not count. A resumed trainer goes on behind the last step. A Branch undoes steps: only those that stay are
here, so a step number occurs once; what is left of the others is that their groups stay closed, the drops decided
meanwhile stay decided, and the numbers of their versions stay used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.errors import RollmillError
from schemas.decisions import (
    Action,
    Alarm,
    Branch,
    Decision,
    Evaluated,
    GroupDropped,
    Guard,
    RunEnded,
    StepDecided,
    TrainerStarted,
    VersionPublished,
    live_decisions,
    undone_by,
)
from schemas.scores import Purpose
from trainer.algorithm_config import AlgorithmConfig, Lora
from trainer.config import CurriculumConfig, StopConfig
from trainer.groups import Script
from trainer.rules import GroupRules
from trainer.state import TrainerState


@dataclass
class History:
    """The live decisions of one run."""

    started: dict[int, TrainerStarted] = field(default_factory=dict)
    """Epoch -> who took over, oldest first."""
    steps: dict[int, StepDecided] = field(default_factory=dict)
    """Step number -> decision, of the steps that were not undone."""
    drops: dict[str, GroupDropped] = field(default_factory=dict)
    """Group -> decision."""
    versions: list[VersionPublished] = field(default_factory=list)
    """In log order, those of undone steps too: their numbers are used."""
    branches: list[Branch] = field(default_factory=list)
    """In log order."""
    evaluations: dict[int, Evaluated] = field(default_factory=dict)
    """Step -> what its version achieved, of the steps that were not undone."""
    gate: Evaluated | None = None
    """What the model that the run begins with achieved before its first step."""
    alarms: dict[tuple[int, Guard], Alarm] = field(default_factory=dict)
    """Step and guard -> the alarm, of the steps that were not undone."""
    stopped_by: Alarm | None = None
    """The alarm that the run ends with, until the end is written down."""
    closed_from: dict[str, int] = field(default_factory=dict)
    """Group of an undone step -> the step from which on it is closed: the lowest one that the run went on from."""
    settled: set[str] = field(default_factory=set)
    """Groups dropped while later undone steps were live: by their lags, which nobody can find again."""
    ended: RunEnded | None = None
    """The end, unless a trainer has started since."""
    _alarmed_at: dict[tuple[int, Guard], int] = field(default_factory=dict)
    """Offset of each alarm."""
    _offsets: dict[int, int] = field(default_factory=dict)
    """Step number -> offset of its decision."""
    _lr_scales: list[tuple[int, float]] = field(default_factory=list)
    """Offset of a branch, and its factor on the learning rate."""
    _dropped_at: dict[str, int] = field(default_factory=dict)
    """Group -> offset of its drop."""
    _undone: set[int] = field(default_factory=set)
    """Versions made by steps that were undone."""
    _undone_steps: set[tuple[int, str]] = field(default_factory=set)
    """(number, digest) of steps that were undone."""
    _since_branch: int = 0
    """How many versions were there at the last branch."""

    @classmethod
    def of(cls, records: Iterable[tuple[int, Decision]]) -> History:
        """Return the history in all (offset, decision) of a run, live or not."""
        history = cls()
        for offset, decision in live_decisions(records):
            history.add(offset, decision)
        return history

    def add(self, offset: int, decision: Decision) -> None:
        """Take the next live decision."""
        match decision:
            case TrainerStarted():
                self.started[offset] = decision
                self.ended = None
            case StepDecided():
                # A broker client that lost an acknowledgement writes a record again: the same step, twice in the log.
                if self.steps.get(decision.step, decision) != decision:
                    raise RollmillError(f"step {decision.step} is decided twice in `decisions`, again at {offset}")
                self.steps[decision.step] = decision
                self._offsets[decision.step] = offset
            case GroupDropped():
                self.drops[decision.group] = decision
                self._dropped_at[decision.group] = offset
            case VersionPublished():
                self.versions.append(decision)
            case RunEnded():
                self.ended = decision
                self.stopped_by = None
            case Alarm():
                self.alarms[decision.step, decision.guard] = decision
                self._alarmed_at[decision.step, decision.guard] = offset
                if decision.action is Action.STOP:
                    self.stopped_by = decision
            case Branch():
                self._lr_scales.append((offset, decision.lr_scale))
                self._branch(decision)
            case Evaluated(purpose=Purpose.GATE):
                self.gate = decision
            case Evaluated():
                self.evaluations[decision.step] = decision

    def _branch(self, branch: Branch) -> None:
        stays = branch.from_step
        self.branches.append(branch)
        self.stopped_by = None
        self.alarms = {key: alarm for key, alarm in self.alarms.items() if key[0] <= stays}
        for group in self.closed_from:
            self.closed_from[group] = min(self.closed_from[group], stays)
        for number in undone_by(list(self.steps), branch):
            step = self.steps.pop(number)
            self._undone_steps.add((number, step.digest))
            self.closed_from.update(dict.fromkeys((member.group for member in step.members), stays))
        self.evaluations = {step: found for step, found in self.evaluations.items() if step <= stays}
        decided = self._offsets.get(stays, -1)
        self.settled |= {group for group, offset in self._dropped_at.items() if offset > decided}
        self._undone |= {v.version for v in self.versions if v.step > stays}
        self._since_branch = len(self.versions)

    @property
    def start(self) -> int | None:
        """First offset of `trajectories` that belongs to the run; none if no trainer ever started."""
        return next((s.start for s in self.started.values()), None)

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the last trainer."""
        return next((s.config for s in reversed(self.started.values())), {})

    @property
    def made_by(self) -> dict[int, int]:
        """Version -> step that made it. Weights of undone steps are of another line, at no distance from this one."""
        return {v.version: v.step for v in self.versions if v.version not in self._undone}

    @property
    def position(self) -> int:
        """Offset of `trajectories` up to which something was decided, by steps that are undone too."""
        decided: list[StepDecided | GroupDropped | Branch] = [
            *self.steps.values(),
            *self.drops.values(),
            *self.branches,
        ]
        return max((decision.position for decision in decided), default=self.start or 0)

    @property
    def reusable(self) -> list[VersionPublished]:
        """Versions that keep their number if the same weights are made again: those since the last branch.

        After a branch even weights that stay get a new number: whoever waits for it does not take undone ones.
        """
        return self.versions[self._since_branch :]

    @property
    def lowest_version(self) -> int:
        """Lowest version that may sample for this run now: the first one after the last branch."""
        return max((v.version for v in self.versions[: self._since_branch]), default=-1) + 1

    def lr_scale(self, step: int) -> float:
        """Return the factor on the learning rate of a step, decided or not: of branches and alarms before it."""
        decided = self._offsets[step] if step in self.steps else math.inf
        alarms = [(self._alarmed_at[key], alarm.lr_scale) for key, alarm in self.alarms.items()]
        return math.prod(scale for offset, scale in [*self._lr_scales, *alarms] if offset < decided)

    @property
    def went_back(self) -> bool:
        """Tell whether the trainer went back by itself once."""
        return any(branch.cause for branch in self.branches)

    @property
    def next_version(self) -> int:
        """The first number that was never used."""
        return max((v.version for v in self.versions), default=-1) + 1

    def holds(self, state: TrainerState) -> bool:
        """Tell whether a checkpoint's last step is the one that the log names: otherwise it is of another log."""
        return state.step == 0 or (state.step in self.steps and self.steps[state.step].digest == state.digest)

    def knows(self, state: TrainerState) -> bool:
        """Tell whether a checkpoint is of this log, be its step undone."""
        return self.holds(state) or (state.step, state.digest) in self._undone_steps

    @property
    def last_step(self) -> int:
        """Number of the last step that was not undone."""
        return max(self.steps, default=0)

    def script(self, after: int) -> Script:
        """Return the decisions that a trainer which has made `after` steps must make again."""
        steps = {number: step for number, step in self.steps.items() if number > after}
        rules = {epoch: rules_of(self.started[epoch].config) for epoch in {step.epoch for step in steps.values()}}
        return Script(
            steps=steps,
            rules={number: rules[step.epoch] for number, step in steps.items()},
            drops={group: drop.reason for group, drop in self.drops.items()},
            closed_from=self.closed_from,
        )


def rules_of(config: Mapping[str, Any]) -> GroupRules:
    """Return the rules in a configuration as a trainer wrote it down; a key that it did not know had its default."""
    curriculum = CurriculumConfig.model_validate(config.get("curriculum", {}))
    return GroupRules.of(algorithm_of(config), stop_of(config), curriculum)


def lora_of(config: Mapping[str, Any]) -> Lora | None:
    """Return the adapters of a recorded configuration, if it has any."""
    return algorithm_of(config).lora


def stop_of(config: Mapping[str, Any]) -> StopConfig:
    """Return when the run of a recorded configuration ends."""
    return StopConfig.model_validate(config.get("stop", {}))


def algorithm_of(config: Mapping[str, Any]) -> AlgorithmConfig:
    """Return how a trainer trained, by the configuration that it wrote down; what it did not write had its default."""
    return AlgorithmConfig.model_validate(config.get("algorithm", {}))
