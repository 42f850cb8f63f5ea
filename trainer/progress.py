"""What a run is doing, for people: counters, the last step, and the same as points for `metrics`.

Nothing here decides anything. Rates use the clock of the loop; idle is the time in which the optimizer waited for
something (`idle.py` says what).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from infra.clock import Clock
from infra.trajectories import trajectories_of
from schemas.decisions import DropReason
from schemas.telemetry import MetricPoint, Metrics
from trainer.algorithm_config import Filter
from trainer.config import StopConfig
from trainer.exclusion import Exclusion
from trainer.groups import Dropped, GroupAssembler, Step
from trainer.idle import IdleTime
from trainer.rules import varies
from trainer.step_metrics import StepMetrics
from trainer.terminal import Terminal

PACE_STEPS = 10
"""How long the next steps take is judged by so many of the last ones."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A run at one moment."""

    run: str
    """The run."""
    phase: str = "starting"
    """`starting`, `catching up`, `waiting`, `training`, `evaluating`, `ended: <reason>`."""
    step: int = 0
    """Steps made."""
    max_steps: int = 0
    """Steps to make."""
    version: int = 0
    """Version of the weights that was announced last."""
    kept: int = 0
    """Groups trained on by this trainer."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Groups dropped by this trainer, by reason."""
    buffered: int = 0
    """Complete groups that wait for their step."""
    partial: int = 0
    """Groups some of whose siblings have ended."""
    recent_success: float = 0.0
    """Mean success of the last complete groups, kept and dropped."""
    recent_groups: int = 0
    """How many groups that is over."""
    measured: int = 0
    """Step that the figures below are of; 0 before the first one."""
    again: bool = False
    """It was decided before, and made again from its record."""
    reward: float = 0.0
    """Mean shaped reward of the last step's batch."""
    components: Mapping[str, float] = field(default_factory=dict)
    """The same by component; where a sample lacks one it counts as 0."""
    success: float = 0.0
    """Mean success of the last step's batch."""
    excluded: float = 0.0
    """Share of its siblings that failed, expired or were cancelled."""
    mixed_share: float = 0.0
    """Share of the groups decided since the step before whose siblings differed in success."""
    idle_share: float = 0.0
    """Share of the time since the step before in which the optimizer waited."""
    idle_causes: Mapping[str, float] = field(default_factory=dict)
    """The same by what it waited for, the most first."""
    tokens_per_s: float = 0.0
    """Sampled tokens of the batch per second since the step before."""
    step_s: float = 0.0
    """Time that the optimizer took, seconds."""
    left_s: float | None = None
    """Time until the run ends by its steps or its limit, as fast as it goes now, seconds; none before it is known."""
    last: StepMetrics = field(default_factory=StepMetrics)
    """Of the last step."""


@dataclass
class Meter:
    """Collects what `Progress` shows."""

    clock: Clock
    now: Progress
    stop: StopConfig
    """When the run ends."""
    alarm: str | None = None
    """What a person should hear of at this step."""
    _exclusion: Exclusion = field(default_factory=Exclusion)
    _began: float = 0.0
    _since: float = 0.0
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    """Seconds from one step to the next, of the last new ones."""
    _dropped: Counter[str] = field(default_factory=Counter)
    _dropped_since: Counter[str] = field(default_factory=Counter)
    _mixed: list[bool] = field(default_factory=list)
    """Of each group that was dropped since the last step and had siblings to compare."""

    def __post_init__(self) -> None:
        self.idle = IdleTime(self.clock)
        self.begin()

    def begin(self) -> None:
        """Count time from here on: training begins."""
        self._began = self._since = self.clock.monotonic()

    def why_no_step(self) -> str:
        """Say what became of the groups since the last step, and what that means."""
        dropped = sum(self._dropped_since.values())
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._dropped_since.most_common())
        broken = self._dropped_since.most_common(1)[0][0] == DropReason.INCOMPLETE.value
        meaning = (
            "samples do not complete for reasons of the system; see the causes of their outcomes"
            if broken
            else "the task is too easy or too hard"
        )
        return f"{dropped} groups dropped without a step ({reasons}): {meaning}"

    def what_it_waits_for(self, assembler: GroupAssembler, needed: int, silent_s: float) -> str:
        """Tell a person; a trainer waits as long as it takes, and a cancelled run gives it nothing any more."""
        dropped = ", ".join(f"{count} as {reason}" for reason, count in sorted(self._dropped_since.items())) or "none"
        return (
            f"step {assembler.steps + 1} waits for records, none came for {silent_s:.0f} s in partition "
            f"{trajectories_of(self.now.run).partition} of `trajectories` behind offset {assembler.position}: "
            f"{assembler.kept} of {needed} groups are complete, {assembler.open_groups} are begun, dropped since the "
            f"last step: {dropped}. `rollmill runs` tells whether the run is cancelled, `rollmill status` which stage "
            f"is behind"
        )

    def drop(self, event: Dropped) -> None:
        """Count a dropped group."""
        self._exclusion.take(event.group, late=event.reason is DropReason.LATE)
        self._dropped[event.reason.value] += 1
        self._dropped_since[event.reason.value] += 1
        if len(event.group.completed) > 1:
            self._mixed.append(varies(event.group, Filter.SUCCESS))
        self.now = replace(self.now, dropped=dict(self._dropped))

    def step(self, step: Step, metrics: StepMetrics, took_s: float) -> tuple[MetricPoint, ...]:
        """Take a finished step and return its points."""
        for group in step.groups:
            self._exclusion.take(group)
        self.alarm = self._exclusion.alarm()
        elapsed = max(self.clock.monotonic() - self._since, 1e-9)
        if step.recorded is None:
            self._took.append(elapsed)
        graded = step.terminals
        siblings = len(graded) + sum(group.excluded for group in step.groups)
        idle = self.idle.shares(elapsed)
        mixed = [*self._mixed, *(varies(g, Filter.SUCCESS) for g in step.groups if len(g.completed) > 1)]
        self.now = replace(
            self.now,
            step=step.number,
            measured=step.number,
            again=step.recorded is not None,
            kept=self.now.kept + len(step.groups),
            reward=float(np.mean([t.reward for t in graded])),
            components=component_means(graded),
            success=float(np.mean([t.success for t in graded])),
            excluded=1 - len(graded) / siblings,
            mixed_share=sum(mixed) / len(mixed) if mixed else 0.0,
            idle_share=min(1.0, sum(idle.values())),
            idle_causes=idle,
            tokens_per_s=metrics.tokens / elapsed,
            step_s=took_s,
            left_s=self._left_s(step.number),
            last=metrics,
        )
        points = self._points(step)
        self._since = self.clock.monotonic()
        self._dropped_since.clear()
        self._mixed.clear()
        return points

    def _left_s(self, step: int) -> float | None:
        """Return how long the run goes on after a step, if nothing but its steps and its limit ends it."""
        if not self._took:
            return None
        pace = sum(self._took) / len(self._took)
        left = pace * max(0, self.stop.max_steps - step)
        if self.stop.time_limit_s is None:
            return left
        limit = self._began + self.stop.time_limit_s - self.clock.monotonic()
        return min(left, max(limit, pace * (self.stop.min_steps - step), 0.0))

    def _points(self, step: Step) -> tuple[MetricPoint, ...]:
        at_ms, now = self.clock.now_ms(), self.now
        values = {
            "trainer.reward_mean": now.reward,
            "trainer.success_mean": now.success,
            "trainer.recent_success_mean": now.recent_success,
            "trainer.groups_kept": float(len(step.groups)),
            "trainer.groups_missing": float(step.missing),
            "trainer.excluded_share": now.excluded,
            "trainer.mixed_share": now.mixed_share,
            "trainer.idle_share": now.idle_share,
            "trainer.tokens_per_s": now.tokens_per_s,
            "trainer.step_s": now.step_s,
            "trainer.left_s": now.left_s,
            **{_STEP_NAMES[name]: value for name, value in asdict(now.last).items()},
        }
        plain = [
            MetricPoint(name=name, value=float(v), at_ms=at_ms, step=step.number)
            for name, v in values.items()
            if v is not None
        ]
        by_label = [
            MetricPoint(name=name, value=float(value), at_ms=at_ms, step=step.number, labels={label: key})
            for name, label, found in (
                ("trainer.reward_component_mean", "component", now.components),
                ("trainer.idle_cause_share", "cause", now.idle_causes),
                ("trainer.groups_dropped", "reason", self._dropped_since),
            )
            for key, value in sorted(found.items())
        ]
        return (*plain, *by_label, *self._exclusion.points(at_ms, step.number))

    def metrics(self, points: tuple[MetricPoint, ...]) -> Metrics:
        """Return points as a message."""
        return Metrics(run=self.now.run, service="trainer", points=points)


def component_means(graded: Sequence[Terminal]) -> dict[str, float]:
    """Return the mean of each component of the rewards of some samples, in the order in which they are met."""
    sums: dict[str, float] = {}
    for name, value in (component for sample in graded for component in sample.components):
        sums[name] = sums.get(name, 0.0) + value
    return {name: total / len(graded) for name, total in sums.items() if math.isfinite(total)}


_STEP_NAMES = {
    "loss": "trainer.loss",
    "grad_norm": "trainer.grad_norm",
    "entropy": "trainer.entropy_nats",
    "clip_share": "trainer.clip_share",
    "kl": "trainer.kl_nats",
    "weight": "trainer.importance_weight_mean",
    "distrusted_share": "trainer.distrusted_share",
    "learning_rate": "trainer.learning_rate",
    "entropy_weight": "trainer.entropy_weight",
    "mismatch": "trainer.mismatch_lag0_nats",
    "lag_mean": "trainer.lag_mean_steps",
    "lag_max": "trainer.lag_max_steps",
    "tokens": "trainer.tokens",
    "masked_share": "trainer.masked_share",
    "repetition": "trainer.repetition_share",
    "unearned": "trainer.unearned_reward_mean",
    "value_loss": "trainer.value_loss",
    "value_explained": "trainer.value_explained_share",
    "optimizer_steps": "trainer.optimizer_steps",
}
