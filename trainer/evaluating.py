"""One trainer's evaluations: beside its training, one at a time, each written down once.

The policy serves a version until its evaluation has ended: `settle` comes before the next version is announced, and
before the next checkpoint is written, so that a trainer that died meanwhile is followed by one that passes the step
again and evaluates it then. What is written down already is not evaluated again. Nothing here decides what is trained
on; how a suite is played is the evaluator's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.clock import Clock
from infra.errors import ConfigError
from infra.wire import Publisher
from schemas.decisions import Evaluated
from schemas.scores import Purpose, Scores
from schemas.telemetry import MetricPoint, Metrics
from schemas.topics import METRICS
from trainer.collapse import GoBack, collapse
from trainer.config import RunConfig
from trainer.decision_log import DecisionLog
from trainer.evaluation import Evaluator, best
from trainer.gate import pass_gate
from trainer.history import History

log = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
"""While an evaluation is waited for, a trainer that took over is noticed within this, seconds."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    """An evaluation in progress."""

    step: int
    version: int
    purpose: Purpose
    work: asyncio.Task[Scores]


class Evaluations:
    """The evaluations of one run by one trainer."""

    def __init__(
        self,
        config: RunConfig,
        evaluator: Evaluator | None,
        decisions: DecisionLog,
        publisher: Publisher,
        clock: Clock,
        tell: Callable[[str, Sequence[MetricPoint]], None] = lambda *_: None,
    ) -> None:
        """Set up; a run without `[evaluation]` has none.

        Args:
            config: the run.
            evaluator: plays its suite.
            decisions: where results are written down.
            publisher: for the same as metrics.
            clock: for times.
            tell: given the same, with its purpose.

        Raises:
            ConfigError: the run wants evaluations, and nobody can play them.
        """
        if config.evaluation is not None and evaluator is None:
            raise ConfigError(
                f"run {config.run!r} has an [evaluation], and nobody here can play its suite: start it by "
                f"`rollmill train RUN.toml`, give `trainer.loop.run` an `evaluator`, or leave the section out"
            )
        self._config = config.evaluation
        self._algorithm = config.algorithm
        self._run = config.run
        self._evaluator = evaluator
        self._decisions = decisions
        self._publisher = publisher
        self._clock = clock
        self._tell = tell
        self._known: dict[int, Scores] = {}
        self._gate: Scores | None = None
        self._begun = False
        self._went_back = False
        self._announced = 0
        self._running: _Running | None = None

    def stand(self, history: History) -> None:
        """Know what was evaluated before."""
        self._known = {step: found.scores for step, found in history.evaluations.items()}
        self._gate = history.gate.scores if history.gate else None
        self._begun = bool(history.steps or history.branches)
        self._went_back = history.went_back
        self._announced = max(history.made_by.values(), default=0)

    @property
    def best(self) -> int | None:
        """The step whose version achieved most so far."""
        return best(self._known)

    def best_until(self, step: int) -> int:
        """Return the step whose version achieved most of those up to a step; that step if none was evaluated."""
        top = best({number: found for number, found in self._known.items() if number <= step})
        return step if top is None else top

    @property
    def running(self) -> bool:
        """Tell whether one is in progress."""
        return self._running is not None

    def due(self, step: int) -> bool:
        """Tell whether the version of a step is to be evaluated: not if it was, nor once a later one was announced."""
        if self._config is None or step % self._config.every:
            return False
        return step not in self._known and step >= self._announced

    def begin(self, step: int, version: int, purpose: Purpose = Purpose.EVALUATION) -> None:
        """Evaluate a version that was just announced; the one before must be settled."""
        assert self._running is None, "one evaluation at a time: settle it first"
        assert self._evaluator is not None, "a run without an [evaluation] has nothing due"
        log.info("run %s: version %d of step %d is evaluated (%s)", self._run, version, step, purpose.value)
        work = asyncio.create_task(self._evaluator.evaluate(version, step, purpose))
        self._running = _Running(step=step, version=version, purpose=purpose, work=work)

    async def pass_gate(self, version: int, *, force: bool) -> None:
        """Probe the model that the run begins with, before its first step; it is probed once.

        Raises:
            trainer.gate.GateRefused: it is not fit to be trained, and nobody forces it.
        """
        if self._config is None or self._begun:
            return
        if self._gate is None:
            self.begin(0, version, Purpose.GATE)
            self._gate = await self.settle()
        assert self._gate is not None, "what was begun has settled"
        pass_gate(self._run, self._gate, self._algorithm, force=force)
        self._begun = True

    async def settle(self) -> Scores | None:
        """Wait for the evaluation in progress and write it down; return its figures.

        Raises:
            trainer.decision_log.Fenced: another trainer took over meanwhile.
        """
        while self._running is not None and not self._running.work.done():
            await self._decisions.check()
            waking = asyncio.ensure_future(self._clock.sleep(CHECK_EVERY_S))
            try:
                await asyncio.wait({self._running.work, waking}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waking.cancel()
        return await self.note()

    async def note(self) -> Scores | None:
        """Write the evaluation in progress down if it has ended; return its figures then."""
        running = self._running
        if running is None or not running.work.done():
            return None
        self._running = None
        scores = running.work.result()
        await self._decisions.write(
            Evaluated(
                run=self._run,
                epoch=self._decisions.epoch,
                step=running.step,
                version=running.version,
                purpose=running.purpose,
                scores=scores,
            )
        )
        if running.purpose is Purpose.EVALUATION:
            self._known[running.step] = scores
        log.info("run %s: %s of step %d: %s", self._run, running.purpose.value, running.step, told(scores))
        points = points_of(running.step, running.purpose, scores, self._clock.now_ms())
        await self._publisher.publish(METRICS, Metrics(run=self._run, service="trainer", points=points))
        self._tell(running.purpose.value, points)
        return scores

    def judge(self, step: int, entropy: float) -> str | None:
        """Return why the run should end now that a step's version was evaluated; none if it goes on, or was not.

        Args:
            step: the step.
            entropy: of its version, nats per sampled token.

        Raises:
            trainer.collapse.GoBack: the run has collapsed for the first time.
        """
        if step not in self._known:
            return None
        cause = collapse(self._known, entropy=entropy, floor=self._algorithm.entropy_floor)
        if not cause:
            return None
        if self.best is None or self._went_back:
            return f"collapsed: {cause}"
        raise GoBack(self.best, cause)

    async def close(self) -> None:
        """Give up what is in progress."""
        if self._running is not None:
            self._running.work.cancel()
            await asyncio.gather(self._running.work, return_exceptions=True)


def points_of(step: int, purpose: Purpose, scores: Scores, at_ms: int) -> tuple[MetricPoint, ...]:
    """Return an evaluation's figures as points."""
    values = {
        "trainer.eval_success_mean": scores.success,
        "trainer.eval_success_low": scores.low,
        "trainer.eval_success_high": scores.high,
        "trainer.eval_reward_mean": scores.reward,
        "trainer.eval_valid_share": scores.valid,
        "trainer.eval_missing_share": scores.missing / scores.samples if scores.samples else 0.0,
    }
    labels = {"purpose": purpose.value}
    return tuple(
        MetricPoint(name=name, value=value, at_ms=at_ms, step=step, labels=labels) for name, value in values.items()
    )


def told(scores: Scores) -> str:
    """Return figures in one line for a person."""
    missing = f", {scores.missing} of {scores.samples} samples are missing" if scores.missing else ""
    return (
        f"success {scores.success:.3f} ({scores.low:.3f} to {scores.high:.3f}) over {scores.tasks} tasks, "
        f"allowed actions {scores.valid:.1%} of {scores.turns}{missing}{': incomplete' if scores.incomplete else ''}"
    )
