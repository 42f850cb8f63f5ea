"""One trainer's guards: they count from step to step, write each alarm down once, and do what its rule says.

An alarm is written before the checkpoint of its step and before the next step is decided. So a trainer that was killed
around it is followed by one that makes the step again, finds the alarm in the log, and does what has not been done:
halving counts by the log alone, going back is a branch, an end is a record. Steps that are made again on the way there
are only counted. What is an alarm is `guards.py`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from infra.clock import Clock
from infra.errors import ConfigError
from infra.wire import Publisher
from schemas.decisions import Action, Alarm
from schemas.telemetry import MetricPoint, Metrics
from schemas.topics import METRICS
from trainer.collapse import LR_SCALE, GoBack
from trainer.config import RunConfig
from trainer.decision_log import DecisionLog
from trainer.guards import Figures, Finding, judge
from trainer.history import History

log = logging.getLogger(__name__)


class Guarding:
    """The guards of one run by one trainer."""

    _history: History

    def __init__(self, config: RunConfig, decisions: DecisionLog, publisher: Publisher, clock: Clock) -> None:
        """Set up.

        Args:
            config: the run.
            decisions: where alarms are written down.
            publisher: for the same as metrics.
            clock: for times.

        Raises:
            ConfigError: nobody has found out how good the rule is that the run is to be compared with.
        """
        baseline = config.guards.baseline
        if baseline is not None and baseline.bound is None:
            raise ConfigError(
                f"run {config.run!r} is compared with the rule {baseline.rule!r}, which this program cannot play: "
                f"start it by `rollmill train`, or give guards.baseline.bound"
            )
        self._rules = config.guards
        self._run = config.run
        self._decisions = decisions
        self._publisher = publisher
        self._clock = clock
        self.counts: Mapping[str, int] = {}
        """Guard -> steps in a row beyond its bound."""

    def stand(self, history: History, counts: Mapping[str, int]) -> None:
        """Know what was found before: the alarms of the log, and the counts of a checkpoint."""
        self._history = history
        self.counts = counts

    def ended(self, step: int) -> str | None:
        """Return why the run ends if its last step is this one, and an alarm has ended it that nobody wrote down."""
        alarm = self._history.stopped_by
        return reason(alarm.cause) if alarm is not None and alarm.step == step else None

    async def judge(self, step: int, figures: Figures, *, again: bool, best: Callable[[int], int]) -> str | None:
        """Count a step that was made, and return why the run should end now, if it should.

        Args:
            step: the step.
            figures: what it was like.
            again: later steps are recorded already, so that nothing can follow from this one any more.
            best: the step to go back to, of those up to a given one.

        Raises:
            trainer.collapse.GoBack: the run shall go on from an earlier step.
        """
        self.counts, found = judge(self._rules, self.counts, figures)
        told = [] if again else [(await self._raise(step, finding), finding) for finding in found]
        # All are written down first, and an end is stronger than going back: nobody is there to see what comes of that.
        for action, finding in told:
            if action is Action.STOP:
                return reason(finding.cause)
        for action, finding in told:
            if action is Action.BACK:
                # The figures of its first step were those of the version before.
                raise GoBack(best(max(0, step - finding.steps - 1)), finding.cause)
        return None

    async def _raise(self, step: int, finding: Finding) -> Action:
        """Write an alarm down unless it is, and return what follows."""
        known = self._history.alarms.get((step, finding.guard))
        if known is not None:
            return known.action
        ends = finding.action is Action.BACK and self._history.went_back
        alarm = Alarm(
            run=self._run,
            epoch=self._decisions.epoch,
            step=step,
            guard=finding.guard,
            value=finding.value,
            bound=finding.bound,
            steps=finding.steps,
            action=Action.STOP if ends else finding.action,
            cause=finding.cause,
            lr_scale=LR_SCALE if finding.action is Action.SLOW else 1.0,
        )
        self._history.add(await self._decisions.write(alarm), alarm)
        log.warning("%s", alarm)
        await self._publisher.publish(METRICS, self._metrics(alarm))
        return alarm.action

    def _metrics(self, alarm: Alarm) -> Metrics:
        point = MetricPoint(
            name="trainer.alarm_value",
            value=alarm.value,
            at_ms=self._clock.now_ms(),
            step=alarm.step,
            labels={"guard": alarm.guard.value, "action": alarm.action.value},
        )
        return Metrics(run=self._run, service="trainer", points=(point,))


def reason(cause: str) -> str:
    """Return why a run has ended, if an alarm has ended it."""
    return f"ended by its guard: {cause}"
