"""What the stage topics carry: Task -> Episode -> Rollout -> Trajectory.

Each message embeds the Task it came from, so that any record can be understood, retried or replayed alone. The wire
contract with golden bytes is `docs/wire.md`. Token arrays are bytes; see `transcript.py`.
"""

from __future__ import annotations

import math
from typing import Any, Self

import msgspec

from schemas.identity import run_name
from schemas.message import Message, Part
from schemas.outcome import Boundary, Completed, Failed, FailureKind, Outcome, StopReason, grade_flaw
from schemas.transcript import Sampling, Transcript, TranscriptError, check

MAX_TIME_MS = 10_382_256_000_000
"""Latest time a record may name, milliseconds since the epoch: the end of ClickHouse's DateTime64(3)."""

LONGEST_BUDGET_S = 10 * 365 * 86_400.0
"""Longest time inside one stage, seconds."""

GROUP_CHARS = 200
"""Longest id of a group; ours have 20, and a foreign producer may have names of its own."""

_COUNT = (0, 2**31 - 1)

TASK_RANGES: dict[str, tuple[int, int]] = {
    "sample": _COUNT,
    "samples": (1, 2**31 - 1),
    "attempt": _COUNT,
    "visit": _COUNT,
    "row": (0, 2**53),
    "seed": (0, 2**63 - 1),
    "start_by_ms": (0, MAX_TIME_MS),
    "horizon": (1, 2**31 - 1),
    "max_sampled_tokens": (1, 2**31 - 1),
    "min_version": (0, 2**53),
    "admission": (0, 2**53),
    "phase": _COUNT,
}
"""Field of a task -> lowest and highest value."""


class Budgets(Part, frozen=True, kw_only=True):
    """Time a task may spend inside each stage, in seconds; waiting in a queue does not count."""

    init_s: float = 120.0
    """Inside INIT."""
    run_s: float = 1800.0
    """Inside RUN."""
    eval_s: float = 300.0
    """Inside EVAL."""

    def check(self) -> None:
        """Raise ValueError unless every budget is a time."""
        for name in self.__struct_fields__:
            seconds = getattr(self, name)
            if not 0 <= seconds <= LONGEST_BUDGET_S:  # NaN is neither more nor less
                raise ValueError(f"budgets.{name} is {seconds}; a budget is 0 to {LONGEST_BUDGET_S:g} s")

    @property
    def total_s(self) -> float:
        """Sum over the stages."""
        return self.init_s + self.run_s + self.eval_s


class Shaping(Part, frozen=True, kw_only=True):
    """How much the parts of a reward count: stamped on a group at admission, so its siblings agree."""

    weights: dict[str, float] = {}
    """Component -> its factor; a component of the family that is not named counts once. EVAL adds `repeated_actions`
    and `long_actions` where they are named; `process` is the factor of the turns' rewards."""
    long_action: int = 0
    """Sampled tokens above which an action is over-long; 0: only if the engine cut it off."""
    once_per_state: bool = False
    """A turn has a process reward only if it led to what was not seen before in its episode."""

    def check(self) -> None:
        """Raise ValueError unless every factor is a number."""
        for name, weight in self.weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"shaping.weights.{name} is {weight}; a weight is a finite number")
        if self.long_action < 0:
            raise ValueError(f"shaping.long_action is {self.long_action}; it is 0 or more")


class SampleId(Part, frozen=True, kw_only=True, order=True):
    """Names one rollout to be made: the unit that gets exactly one accepted outcome."""

    run: str
    """The experiment."""
    group: str
    """One task instance at one visit."""
    sample: int
    """Sibling number, 0 .. samples - 1."""


class Task(Message, frozen=True, kw_only=True, tag="rollmill.task"):
    """One sample to roll out."""

    run: str
    """The experiment."""
    group: str
    """One task instance at one visit; siblings share it."""
    sample: int
    """Sibling number, 0 .. samples - 1."""
    samples: int
    """Number of siblings in the group."""
    attempt: int = 0
    """Counts restarts of this sample after a failure of the system."""
    source: str
    """Name of the place the instance came from, such as a file's name."""
    visit: int = 0
    """How many times the source was passed before."""
    row: int = 0
    """Place of the instance in its source."""
    payload: dict[str, Any]
    """What the family needs to build the environment."""
    payload_digest: str
    """Digest of the canonical payload (`identity.payload_digest`)."""
    family: str
    """Which handler runs it."""
    seed: int
    """Seed of the environment, the same for all siblings."""
    admission: int | None = None
    """The feeder's dense group number; none for a task of a foreign producer."""
    start_by_ms: int
    """Not started later than this, at any attempt; milliseconds since the epoch."""
    budgets: Budgets = Budgets()
    """Time inside each stage."""
    horizon: int = 16
    """Most turns."""
    max_sampled_tokens: int = 4096
    """Most tokens sampled over the whole episode."""
    sampling: Sampling = Sampling()
    """How the policy samples."""
    min_version: int = 0
    """RUN waits for a policy of at least this version."""
    weights_of: str | None = None
    """Run whose weights must sample it, by whose numbers `min_version` counts; any unless given."""
    redrive_of: str | None = None
    """The decided group whose work this one repeats."""
    phase: int = 0
    """Phase of its run's curriculum in which its group was admitted."""
    shaping: Shaping | None = None
    """How much the parts of its reward count; as the family gives them unless it is here."""

    def check(self) -> None:
        """Raise ValueError when a number is outside what it can mean: a foreign producer may write anything."""
        run_name(self.run)
        if self.weights_of is not None:
            run_name(self.weights_of)
        if len(self.group) > GROUP_CHARS:
            raise ValueError(f"group has {len(self.group)} characters; it has at most {GROUP_CHARS}")
        self.budgets.check()
        if self.shaping is not None:
            self.shaping.check()
        for name, (low, high) in TASK_RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # a foreign task has no admission number
                raise ValueError(f"{name} is {value}; it is {low} to {high}")
        # A sibling too many would complete a group in the place of one that is still to come.
        if self.sample >= self.samples:
            raise ValueError(f"sample is {self.sample}; with samples = {self.samples} it is 0 to {self.samples - 1}")

    @property
    def id(self) -> SampleId:
        """The sample this task asks for."""
        return SampleId(run=self.run, group=self.group, sample=self.sample)


class Episode(Message, frozen=True, kw_only=True, tag="rollmill.episode"):
    """A sample whose environment is created and reset."""

    task: Task
    """What to roll out."""
    host: str
    """Address of the environment host that holds the lease."""
    lease: str
    """The environment's lease on that host."""
    messages: tuple[dict[str, Any], ...]
    """The opening of the conversation: `role` and `content` each."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tool schemas for the chat template."""
    prompt_version: str = ""
    """Version of the family's prompt."""

    def check(self) -> None:
        """Raise ValueError when its task cannot be one."""
        self.task.check()


class Rollout(Message, frozen=True, kw_only=True, tag="rollmill.rollout"):
    """A finished episode with all that grading needs."""

    task: Task
    """What was rolled out."""
    transcript: Transcript
    """The token record."""
    verdict: dict[str, Any]
    """What the environment held at the end: counters, final state, patch, files."""
    stop: StopReason
    """Why the episode ended."""
    backend: str
    """Addresses of the engines that sampled, separated by spaces, in order."""
    worker: str
    """The RUN worker that drove it."""
    tokenizer_digest: str
    """Digest of tokenizer and chat template."""
    gradings: int = 0
    """Counts gradings of this rollout that a failure of the system ended; the attempt stays."""

    def check(self) -> None:
        """Raise ValueError when its task cannot be one, or when it counts below zero."""
        self.task.check()
        if self.gradings < 0:
            raise ValueError(f"gradings is {self.gradings}; it is 0 or more")


class Trajectory(Message, frozen=True, kw_only=True, tag="rollmill.trajectory"):
    """A terminal record of one sample: the first one in its partition is the accepted outcome."""

    task: Task
    """What was asked for."""
    outcome: Outcome
    """How it ended."""
    transcript: Transcript | None = None
    """The token record, when an episode was completed."""
    verdict: dict[str, Any] | None = None
    """The environment's final state, when an episode was completed."""
    stop: StopReason | None = None
    """Why the episode ended, when it was completed."""
    backend: str = ""
    """Addresses of the engines that sampled, separated by spaces, in order."""
    tokenizer_digest: str = ""
    """Digest of tokenizer and chat template."""
    stage: str
    """The service that wrote this record."""

    def check(self) -> None:
        """Raise ValueError when its task cannot be one."""
        self.task.check()

    def as_read(self) -> Self:
        """Return the record as every reader counts it: what cannot be trained on ends its sample as failed.

        It names its sample, so it is an end, whoever wrote it: were it refused, its group would wait for a sibling
        that has ended, and were each reader to judge for itself, they would disagree on how.
        """
        if not isinstance(self.outcome, Completed):
            return self
        failed = self._flaw(self.outcome)
        return self if failed is None else msgspec.structs.replace(self, outcome=failed)

    def _flaw(self, done: Completed) -> Failed | None:
        """Return the failure that the record of a completed sample is; None if it can count."""
        if self.transcript is not None:
            try:
                check(self.transcript)
            except TranscriptError as error:
                cause = f"its token record breaks an invariant: {error}"
                return Failed(kind=FailureKind.ENGINE, boundary=Boundary.TRANSCRIPT, cause=cause)
        wrong = grade_flaw(done, len(self.transcript.turns) if self.transcript is not None else 0)
        if wrong is None:
            return None
        cause = f"its grade cannot count: {wrong}; a grader of family {self.task.family!r} gave it"
        return Failed(kind=FailureKind.HANDLER, boundary=Boundary.HANDLER_GRADE, cause=cause)
