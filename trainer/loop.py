"""The trainer's loop: trajectories in offset order -> decisions -> steps -> versions -> credit.

Per step: the decision is written and read back (it counts), the optimizer moves, a checkpoint is written, the version
is announced, credit is given. A trainer that dies anywhere in between is followed by one that takes the run over,
loads the last checkpoint, reads `trajectories` again from its `low`, makes every recorded step again from the same
batches without writing it, and only then decides anew. Dropped groups that are already recorded are not written again.

No clock decides what is trained on: a time limit only ends the run, and the end is a record. The model's work runs in
one thread of its own (`learner_thread.py`), so that the log's connection lives on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infra.blobs import BlobsAway
from infra.bus import Bus, Reader, Record
from infra.clock import Clock
from infra.errors import RollmillError
from infra.trajectories import OUTAGE_S, read_trajectory, trajectories_of
from infra.wire import Publisher, Received
from schemas.control import Credit
from schemas.decisions import Branch, RunEnded, TrainerStarted
from schemas.messages import Trajectory
from schemas.topics import CONTROL, METRICS, TRAJECTORIES
from trainer import checkpoint
from trainer.announce import Announcer
from trainer.batching import UntrainableTranscript
from trainer.beginning import (
    Intent,
    find_checkpoint,
    fresh_state,
    origin,
    refuse,
    require_directories,
    tokenizer_of,
)
from trainer.checkpoint import Checkpoint
from trainer.collapse import LR_SCALE, GoBack
from trainer.config import RunConfig
from trainer.credit import credit
from trainer.crew import load_learner
from trainer.decision_log import DecisionLog, read_history
from trainer.decision_records import check_same, group_dropped, step_decided
from trainer.ending import Ending, ending
from trainer.evaluating import Evaluations, points_of
from trainer.evaluation import Evaluator
from trainer.groups import Dropped, Event, GroupAssembler, Step
from trainer.guarding import Guarding
from trainer.guards import Figures, recent_success, unearned
from trainer.history import History
from trainer.idle import Cause, cause_of_silence
from trainer.learner import Learner
from trainer.learner_thread import LearnerThread
from trainer.progress import Meter, Progress
from trainer.ranks import ALONE, Ranks
from trainer.repetition import mean_repetition
from trainer.report import Report
from trainer.resume import identity
from trainer.rules import GroupRules
from trainer.run_lock import RunLock
from trainer.spool import Spool
from trainer.state import TrainerState
from trainer.step_batch import step_batch
from trainer.step_metrics import StepMetrics
from trainer.terminal import terminal
from trainer.weights import weights_digest

log = logging.getLogger(__name__)

POLL_S = 0.25
"""One poll for trajectories lasts at most this long, in seconds: a stop is seen within it."""

MAX_RECORDS = 64
"""Most records of one poll."""

AGAIN_S = 1.0
"""Pause before a value that is away is asked for again, seconds."""

SAY_EVERY_S = 60.0
"""A trainer to which nothing comes says what it waits for this often, seconds."""

WriteManifest = Callable[[], Awaitable[int]]


class OtherTokenizer(RollmillError):
    """Trajectories were sampled with another tokenizer or chat template than the model's."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    reason: str
    """Why."""
    steps: int
    """Steps made in all."""
    version: int
    """Last version announced."""
    directory: str
    """Its model directory."""
    best_step: int | None
    """Step whose version achieved most in the run's evaluations; none without a complete one."""
    progress: Progress
    """The last figures."""


async def run(
    config: RunConfig,
    bus: Bus,
    clock: Clock,
    *,
    resume: bool = False,
    rollback: int | None = None,
    evaluator: Evaluator | None = None,
    force: bool = False,
    stop: asyncio.Event | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_rollouts: Callable[[str], None] = lambda _: None,
    manifest: WriteManifest | None = None,
    ranks: Ranks = ALONE,
) -> RunResult:
    """Train a run to its end.

    Args:
        config: the run.
        bus: the log, connected.
        clock: for limits and rates.
        resume: go on with a run that was started before; without it such a run is refused.
        rollback: go on with it from this step, and undo the later ones.
        evaluator: plays the suite of a run with an `[evaluation]`.
        force: begin it although its model is unfit to be trained.
        stop: ends the run in good order when set.
        on_progress: told what changes.
        on_rollouts: given the text of some rollouts, where the run's `[report]` asks for them.
        manifest: writes the run's manifest when nothing is left that refuses to start, and returns where the run's
            trajectories begin; without it that is the configuration's `start`.
        ranks: those that train together; this is rank 0 of them.

    Raises:
        ConfigError: the run cannot start like this.
        trainer.decision_log.Fenced: another trainer took over.
        trainer.gate.GateRefused: the model that the run begins with is unfit to be trained.
        trainer.ending.NothingToLearn: too many groups in a row were dropped, and the run is told to raise then.
    """
    intent = Intent(resume=resume or rollback is not None, rollback=rollback, force=force)
    require_directories(config)
    with RunLock(config.directory):
        while True:
            trainer = Trainer(config, bus, clock, on_progress, Report(config, on_rollouts), evaluator, ranks)
            try:
                await trainer.take_over(intent, manifest)
                return await trainer.end(await trainer.train(stop or asyncio.Event()))
            except GoBack as back:
                # Once per run, so this ends. The next trainer stands as one does that is resumed with --rollback.
                log.warning("run %s goes back to step %d: %s", config.run, back.step, back.cause)
                intent = Intent(resume=True, rollback=back.step, cause=back.cause)
            finally:
                await trainer.close()


class Trainer:
    """One trainer at work on one run."""

    _learner: Learner
    _assembler: GroupAssembler
    _announcer: Announcer
    _lr_scale: Callable[[int], float]

    def __init__(
        self,
        config: RunConfig,
        bus: Bus,
        clock: Clock,
        on_progress: Callable[[Progress], None],
        report: Report,
        evaluator: Evaluator | None,
        ranks: Ranks,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._bus = bus
        self._clock = clock
        self._on_progress = on_progress
        self._report = report
        self._publisher = Publisher(bus, clock, "trainer")
        self._log = DecisionLog(bus, clock, self._publisher, config.run)
        self._meter = Meter(clock, Progress(run=config.run, max_steps=config.stop.max_steps), config.stop)
        self._evaluations = Evaluations(config, evaluator, self._log, self._publisher, clock, report.figures)
        self._guarding = Guarding(config, self._log, self._publisher, clock)
        self._thread = LearnerThread()
        self._tokenizer = tokenizer_of(config)
        self._spool = Spool(bus, clock, config.run, config.buffer_bytes)
        self._tell_rows = config.curriculum.difficulty is not None
        self._collapsed: str | None = None
        """Why the run ends, if it has collapsed for good or a guard ends it."""
        self._granted = -1
        self._admit_up_to: int | None = None
        self._lowest_version = 0
        self._last = fresh_state(config.run, config.start, -1)
        self._saved = -1
        self._digests: dict[int, str] = {}
        """Step -> its batch digest, of all steps that the run has."""
        self._directory = ""
        self._heard = self._said = 0.0

    # ---- beginning

    async def take_over(self, intent: Intent, manifest: WriteManifest | None) -> None:
        """Become the run's trainer, and stand where its last checkpoint stood."""
        self._show(phase="starting")
        log.info("run %s: loads %s, then reads what was decided", self._config.run, self._config.model)
        now = await self._load()
        history = await read_history(self._bus, self._clock, self._config.run)
        had_ended = history.ended is not None
        saved = await self._thread.run(lambda: find_checkpoint(self._config, history, intent.rollback))
        await self._thread.run(lambda: refuse(self._config, history, now, intent, saved))
        # Not before: a start that was refused leaves no run behind.
        start = self._config.start if manifest is None else await manifest()
        begin = await self._first_offset(start) if history.start is None else history.start
        started = TrainerStarted(
            run=self._config.run,
            config={**now, "start": start},
            start=begin,
            step=saved.state.step if saved else 0,
            forked_from=origin(self._config),
        )
        # Another trainer may have decided since: only what lies before our own record is the past.
        history = History.of(await self._log.take_over(started))
        await self._branch(history, intent)
        if had_ended:
            await self._open_again(history)
        if saved is not None and not history.holds(saved.state):
            saved = await self._thread.run(lambda: find_checkpoint(self._config, history))
        await self._restore(history, saved, begin)
        await self._make_known(force=intent.force)

    async def _open_again(self, history: History) -> None:
        """Take back that the run has ended: a feeder that starts meanwhile would end at once."""
        rules = self._config.algorithm
        nothing_yet = Credit(
            run=self._config.run,
            epoch=self._log.epoch,
            admit_up_to=0,
            min_version=history.lowest_version,
            horizon=rules.horizon,
            temperature=rules.temperature,
        )
        await self._publisher.publish(CONTROL, nothing_yet)

    async def _load(self) -> dict[str, Any]:
        """Load the model and return what the run is now."""
        self._learner = await self._thread.run(lambda: load_learner(self._config, self._ranks))
        weights = await self._thread.run(self._learner.weights)
        return identity(self._config, self._tokenizer, weights_digest(weights), ranks=self._ranks.count)

    async def _branch(self, history: History, intent: Intent) -> None:
        """Undo the steps behind the one to go on from; nothing is written if there are none."""
        rollback = intent.rollback
        if rollback is None:
            return
        if history.last_step <= rollback:
            log.info("run %s: no step lies behind step %d, so there is nothing to undo", self._config.run, rollback)
            return
        branch = Branch(
            run=self._config.run,
            epoch=self._log.epoch,
            from_step=rollback,
            position=history.position,
            cause=intent.cause,
            lr_scale=LR_SCALE if intent.cause else 1.0,
        )
        history.add(await self._log.write(branch), branch)

    async def _restore(self, history: History, saved: Checkpoint | None, begin: int) -> None:
        if saved is not None:
            await self._thread.run(lambda: self._learner.restore(saved.weights, saved.optimizer()))
            self._last, self._saved = saved.state, saved.state.step
        else:
            self._last = fresh_state(self._config.run, begin, self._log.epoch)
        self._digests = {number: step.digest for number, step in history.steps.items()}
        self._stand(history)
        self._tell_from_here(history)
        log.info("run %s: epoch %d, step %d, %d recorded steps to make again", *self._where(history))

    def _stand(self, history: History) -> None:
        config = self._config
        self._assembler = GroupAssembler(
            GroupRules.of(config.algorithm, config.stop, config.curriculum),
            self._last.assembler,
            script=history.script(self._last.step),
            versions=history.made_by,
        )
        self._announcer = Announcer(
            self._log,
            self._publisher,
            run=config.run,
            model=config.model,
            directory=config.versions_directory,
            keep=config.checkpoints.keep_versions,
            known=history.reusable,
            next_version=history.next_version,
        )
        self._lowest_version = history.lowest_version
        self._lr_scale = history.lr_scale
        self._evaluations.stand(history)
        self._guarding.stand(history, self._last.guards)
        if not self._assembler.catching_up:
            self._collapsed = self._guarding.ended(self._last.step)
        self._show(step=self._assembler.steps)

    def _tell_from_here(self, history: History) -> None:
        """Open the run's report; later evaluations, which are not made again, are told from their records."""
        self._report.begin(self._last.step, len(history.branches))
        for step, found in history.evaluations.items():
            if step > self._last.step:
                points = points_of(step, found.purpose, found.scores, self._clock.now_ms())
                self._report.figures(found.purpose.value, points)

    def _where(self, history: History) -> tuple[str, int, int, int]:
        return self._config.run, self._log.epoch, self._last.step, len(history.steps) - self._last.step

    async def _first_offset(self, start: int) -> int:
        begins = await self._bus.begin_offsets(TRAJECTORIES.name)
        return max(start, begins.get(trajectories_of(self._config.run).partition, 0))

    # ---- training

    async def train(self, stop: asyncio.Event) -> Ending:
        """Read and train until the run has ended; return how."""
        partition = trajectories_of(self._config.run)
        began = self._heard = self._clock.monotonic()
        self._meter.begin()
        reader = await self._bus.read({partition: self._assembler.position})
        try:
            while (end := self._ending(stop, began)) is None:
                await self._log.check()
                await self._evaluations.note()
                self._show(phase="catching up" if self._assembler.catching_up else "waiting")
                for record in await self._poll(reader):
                    await self._take(record)
                    # A step that was held may leave enough groups for another one, which needs no record.
                    while self._ending(stop, began) is None and (more := self._assembler.due()):
                        await self._act(more)
                    if self._ending(stop, began) is not None:
                        break
                await self._grant()
        finally:
            await reader.close()
        return end

    async def _poll(self, reader: Reader) -> Sequence[Record]:
        cause = cause_of_silence(self._assembler, self._config.algorithm.groups, self._admit_up_to)
        with self._meter.idle.waiting(cause):
            records = await reader.poll(MAX_RECORDS, POLL_S)
        now = self._clock.monotonic()
        if now - max(self._heard, self._said) >= SAY_EVERY_S:
            self._said = now
            what = self._meter.what_it_waits_for(self._assembler, self._config.algorithm.groups, now - self._heard)
            log.info("run %s: %s", self._config.run, what)
        return records

    def _ending(self, stop: asyncio.Event, began: float) -> Ending | None:
        if self._collapsed is not None:
            return Ending(reason=self._collapsed)
        return ending(
            self._config.stop,
            self._assembler,
            ran_s=self._clock.monotonic() - began,
            stopped=stop.is_set(),
            why_no_step=self._meter.why_no_step,
        )

    async def _take(self, record: Record) -> None:
        received = await self._trajectory(record)
        if received is None:
            return
        found = terminal(received, self._config.algorithm.overlong, keep_tokens=False)
        if found.completed and received.message.transcript is not None:
            self._spool.put(found.offset, received.message.transcript)
        await self._act(self._assembler.feed(found))
        if not self._assembler.waits_for(found):
            self._spool.drop([found.offset])
        recent = self._assembler.recent
        self._show(
            buffered=self._assembler.kept,
            partial=self._assembler.open_groups,
            recent_success=sum(recent) / len(recent) if recent else 0.0,
            recent_groups=len(recent),
        )
        self._heard = self._clock.monotonic()

    async def _trajectory(self, record: Record) -> Received[Trajectory] | None:
        """Return the record if it is a trajectory of this run."""
        received = await self._opened(record)
        if received is None:
            return None
        trajectory = received.message
        if trajectory.tokenizer_digest and trajectory.tokenizer_digest != self._tokenizer:
            raise OtherTokenizer(
                f"{trajectory.task.group}/{trajectory.task.sample} at offset {record.offset} was sampled with "
                f"tokenizer {trajectory.tokenizer_digest[:12]}, the model in {self._config.model} has "
                f"{self._tokenizer[:12]}: let RUN and trainer use the same model directory. The record stays in the "
                f"log: go on in a new run, with the last weights, by --fork NEW_RUN"
            )
        return received

    async def _opened(self, record: Record) -> Received[Trajectory] | None:
        """Read a record; its value may lie in a store that is away for a while."""
        give_up = self._clock.monotonic() + OUTAGE_S
        while True:
            try:
                return await read_trajectory(record, self._config.run, self._bus)
            except BlobsAway as error:
                if self._bus.blobs is None or self._clock.monotonic() > give_up:
                    raise
                log.warning("run %s: waits for the value of offset %d: %s", self._config.run, record.offset, error)
                await self._clock.sleep(AGAIN_S)

    async def _act(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Dropped():
                    await self._drop(event)
                case Step():
                    await self._step(event)

    async def _drop(self, event: Dropped) -> None:
        if not event.recorded:
            await self._log.write(
                group_dropped(event, run=self._config.run, epoch=self._log.epoch, tell_rows=self._tell_rows)
            )
        self._spool.drop(t.offset for t in event.group.completed)
        self._meter.drop(event)

    async def _step(self, step: Step) -> None:
        if step.missing:
            log.warning("step %d lacks %d groups: %s", step.number, step.missing, self._meter.why_no_step())
        if step.recorded is None:
            await self._log.write(
                step_decided(step, run=self._config.run, epoch=self._log.epoch, tell_rows=self._tell_rows)
            )
        else:
            check_same(step, step.recorded)
        self._show(phase="training")
        asked = self._clock.monotonic()
        filled = await self._spool.fill(step)
        metrics = await self._thread.run(lambda: self._learn(filled))
        took_s = self._clock.monotonic() - asked
        await self._settle()
        if not self._assembler.catching_up:
            # Always behind the step that was trained meanwhile: what is undone must not depend on how long it took.
            self._collapsed = self._evaluations.judge(step.number - 1, metrics.entropy)
        self._collapsed = await self._guard(step, metrics) or self._collapsed
        self._digests[step.number] = step.digest
        self._last = TrainerState(
            run=self._config.run,
            epoch=self._log.epoch,
            digest=step.digest,
            decisions=self._log.last_offset,
            assembler=self._assembler.state(),
            guards=self._guarding.counts,
        )
        # A step that is evaluated is one that the run may go back to.
        if step.number % self._config.checkpoints.every == 0 or self._evaluations.due(step.number):
            await self._save()
        await self._make_known()
        points = self._meter.step(step, metrics, took_s)
        if self._meter.alarm:
            log.warning("run %s: %s", self._config.run, self._meter.alarm)
        await self._publisher.publish(METRICS, self._meter.metrics(points))
        self._show()
        self._report.step(filled, points)

    def _learn(self, step: Step) -> StepMetrics:
        """Train on a step; blocking."""
        try:
            batch = step_batch(
                step,
                self._config.algorithm,
                lag=self._assembler.lag_at_use,
                vocabulary=self._learner.vocabulary,
            )
        except UntrainableTranscript as error:
            raise UntrainableTranscript(
                f"step {step.number}: {error}. The step is decided: once that is mended, `--rollback "
                f"{step.number - 1}` goes on without its samples"
            ) from error
        self._learner.lr_scale = self._lr_scale(step.number)
        metrics = self._learner.step(batch, self._thread.given_up)
        repetition = mean_repetition((t.transcript for t in step.terminals), self._config.guards.ngram)
        return replace(metrics, repetition=repetition, unearned=unearned(step.terminals))

    async def _guard(self, step: Step, metrics: StepMetrics) -> str | None:
        """Let the guards see a step that was made; return why the run ends, if they end it."""
        figures = Figures(
            entropy=metrics.entropy,
            repetition=metrics.repetition,
            unearned=metrics.unearned,
            kl=metrics.kl,
            recent_success=recent_success(self._assembler.recent, self._config.stop.success_groups),
        )
        return await self._guarding.judge(
            step.number, figures, again=self._assembler.catching_up, best=self._evaluations.best_until
        )

    async def _settle(self) -> None:
        """Let the evaluation of the version before end: until then that is the one that the policy serves."""
        if self._evaluations.running:
            self._show(phase="evaluating")
            with self._meter.idle.waiting(Cause.EVALUATION):
                await self._evaluations.settle()

    # ---- what follows a step

    async def _make_known(self, *, force: bool = False) -> None:
        """Announce the weights and give credit, unless later ones are already in the log and nobody asks for these."""
        step = self._assembler.steps
        due = self._evaluations.due(step)
        if due or not self._assembler.catching_up:
            with self._meter.idle.waiting(Cause.PUBLICATION):
                version = await self._publish_weights()
            await self._evaluations.pass_gate(version, force=force)
            if due:
                self._evaluations.begin(step, version)
        await self._grant()

    async def _save(self) -> None:
        state, parent = self._last, self._config.checkpoints_directory

        def write() -> None:
            checkpoint.save(parent, state, self._learner.trained_weights(), self._learner.optimizer_bytes())
            limits, live, best = self._config.checkpoints, self._live, self._evaluations.best
            checkpoint.prune(parent, limits.keep, milestones=limits.milestones, own=state, live=live, pinned=(best,))

        with self._meter.idle.waiting(Cause.CHECKPOINT):
            await self._thread.run(write)
        self._saved = state.step

    def _live(self, state: TrainerState) -> bool:
        """Tell whether a checkpoint is of this run as it is: not of another log, not of a step that was undone."""
        return state.step == 0 or self._digests.get(state.step) == state.digest

    async def _publish_weights(self) -> int:
        step = self._assembler.steps
        directory, digest = await self._thread.run(lambda: self._announcer.write(step, self._learner.weights()))
        canary = await self._thread.run(self._learner.canary)
        version = await self._announcer.announce(step, directory, digest, canary)
        self._assembler.published(version, step)
        self._directory = str(directory)
        self._show(version=version)
        return version

    async def _grant(self, *, closed: bool = False) -> None:
        """Tell the feeder how far it may go, if that has changed."""
        if self._assembler.catching_up or (self._assembler.resolved == self._granted and not closed):
            return
        now = credit(
            self._config.run,
            self._log.epoch,
            self._config.algorithm,
            resolved=self._assembler.resolved,
            step=self._assembler.steps,
            versions=self._assembler.versions,
            curriculum=self._config.curriculum,
            rewards=self._config.rewards,
            phase=self._assembler.phase,
            decided=self._log.last_offset,
            lowest_version=self._lowest_version,
            closed=closed,
        )
        await self._publisher.publish(CONTROL, now)
        self._granted, self._admit_up_to = self._assembler.resolved, now.admit_up_to

    # ---- end

    async def end(self, ending: Ending) -> RunResult:
        """Write the end down and close the run's credit. Raises what the run ends with, if that is an error."""
        await self._settle()
        if self._saved != self._last.step:
            await self._save()
        await self._log.write(
            RunEnded(
                run=self._config.run,
                epoch=self._log.epoch,
                position=self._assembler.position,
                step=self._assembler.steps,
                reason=ending.reason,
                unused=self._assembler.buffered(),
            )
        )
        if ending.error is not None:
            raise ending.error
        await self._grant(closed=True)
        self._show(phase=f"ended: {ending.reason}")
        return RunResult(
            reason=ending.reason,
            steps=self._assembler.steps,
            version=self._meter.now.version,
            directory=self._directory,
            best_step=self._evaluations.best,
            progress=self._meter.now,
        )

    async def close(self) -> None:
        """Give up connections and the learner's thread."""
        await self._evaluations.close()
        await self._report.close()
        await self._log.close()
        self._thread.close()

    def _show(self, **changes: object) -> None:
        self._meter.now = replace(self._meter.now, **changes)  # type: ignore[arg-type]
        self._on_progress(self._meter.now)
