"""What a run has decided so far, read from its `decisions`: pure.

Only live decisions enter (`schemas.decisions.live_decisions`): those of a trainer that was replaced before it wrote
them do not count. A step number occurs once; a resumed trainer goes on behind the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.errors import RollmillError
from schemas.decisions import (
    Decision,
    GroupDropped,
    RunEnded,
    StepDecided,
    TrainerStarted,
    VersionPublished,
    live_decisions,
)
from trainer.groups import Script
from trainer.state import TrainerState


@dataclass
class History:
    """The live decisions of one run."""

    started: dict[int, TrainerStarted] = field(default_factory=dict)
    """Epoch -> who took over, oldest first."""
    steps: dict[int, StepDecided] = field(default_factory=dict)
    """Step number -> decision."""
    drops: dict[str, GroupDropped] = field(default_factory=dict)
    """Group -> decision."""
    versions: list[VersionPublished] = field(default_factory=list)
    """In log order."""
    ended: RunEnded | None = None
    """The end, unless a trainer has started since."""
    last_offset: int = -1
    """Offset of the last of them."""

    @classmethod
    def of(cls, records: Iterable[tuple[int, Decision]]) -> History:
        """Return the history in all (offset, decision) of a run, live or not."""
        history = cls()
        for offset, decision in live_decisions(records):
            history._add(offset, decision)
        return history

    def _add(self, offset: int, decision: Decision) -> None:
        self.last_offset = offset
        match decision:
            case TrainerStarted():
                self.started[offset] = decision
                self.ended = None
            case StepDecided():
                # A broker client that lost an acknowledgement writes a record again: the same step, twice in the log.
                if self.steps.get(decision.step, decision) != decision:
                    raise RollmillError(f"step {decision.step} is decided twice in `decisions`, again at {offset}")
                self.steps[decision.step] = decision
            case GroupDropped():
                self.drops[decision.group] = decision
            case VersionPublished():
                self.versions.append(decision)
            case RunEnded():
                self.ended = decision

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
        """Version -> step that made it."""
        return {v.version: v.step for v in self.versions}

    def holds(self, state: TrainerState) -> bool:
        """Tell whether a checkpoint's last step is the one that the log names: otherwise it is of another log."""
        return state.step == 0 or (state.step in self.steps and self.steps[state.step].digest == state.digest)

    def script(self, after: int) -> Script:
        """Return the decisions that a trainer which has made `after` steps must make again."""
        return Script(
            steps={number: step for number, step in self.steps.items() if number > after},
            drops={group: drop.reason for group, drop in self.drops.items()},
        )
