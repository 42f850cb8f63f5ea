"""What the trainer writes down: its decisions are records, so that a run can be replayed and counted.

Every decision carries the epoch of its writer (the offset of its TrainerStarted) and the position in `trajectories` at
which it was made. Readers ignore a decision whose epoch is not that of the last TrainerStarted before it: see
`live_decisions`. A step is one record; what was merely read but not yet used is listed in it (`buffered`), so that
no disposition is ever computed as a remainder. A Branch undoes steps: see `undone_by`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any

from schemas.message import Message, Part
from schemas.scores import Purpose, Scores


class DropReason(StrEnum):
    """Why a complete group is not trained on."""

    NO_VARIANCE = "filtered"
    """All siblings succeeded alike: the group says nothing about which action was better."""
    STALE = "stale"
    """None of its tokens is young enough to be trained on."""
    LATE = "late"
    """Some of its tokens lag more than the run allows, and the run drops such groups."""
    INCOMPLETE = "incomplete"
    """Too few siblings completed."""


class Guard(StrEnum):
    """What is watched, step by step, for a policy that goes astray."""

    ENTROPY = "entropy"
    """The policy's entropy: it does the same whatever it sees."""
    REPETITION = "repetition"
    """Repeated n-grams among what an episode sampled: it turns in circles."""
    FARMING = "farming"
    """What failed episodes earn: it is paid without doing the task."""
    KL = "kl"
    """Distance to the model that the run began with."""
    BASELINE = "baseline"
    """Success beside that of a scripted rule: training has to be worth it."""


class Action(StrEnum):
    """What follows an alarm."""

    TELL = "tell"
    """Nothing but the record and a warning."""
    SLOW = "slow"
    """The learning rate of all later steps is halved, and once more each time it does not help."""
    BACK = "back"
    """The run goes back to its best version before the alarm with half the learning rate; once, then it ends."""
    STOP = "stop"
    """The run ends."""

    @property
    def told(self) -> str:
        """What happens, for a person."""
        return {
            Action.TELL: "the run goes on",
            Action.SLOW: "the learning rate is halved",
            Action.BACK: "the run goes back",
            Action.STOP: "the run ends",
        }[self]


class SampleRef(Part, frozen=True, kw_only=True):
    """An accepted record of one sample."""

    group: str
    """Group of the sample."""
    sample: int
    """Sibling number."""
    offset: int
    """Offset of the accepted record in the run's partition of `trajectories`."""


class RowSuccess(Part, frozen=True, kw_only=True):
    """What a group of the feeder achieved."""

    row: int
    """Place of its task in its source."""
    success: float
    """Mean unshaped success of its graded siblings."""


class Member(Part, frozen=True, kw_only=True):
    """A sample of a batch."""

    group: str
    """Group of the sample."""
    sample: int
    """Sibling number."""
    offset: int
    """Offset of the accepted record."""
    content: str
    """SHA-256 of the record's uncompressed wire bytes."""
    reward: float
    """Shaped reward as used in the step."""


class ForkedFrom(Part, frozen=True, kw_only=True):
    """A checkpoint of another run."""

    run: str
    """That run."""
    epoch: int
    """Epoch of the trainer that wrote the checkpoint."""
    step: int
    """Steps that had been made."""
    weights: str
    """SHA-256 of its weight file."""


class TrainerStarted(Message, frozen=True, kw_only=True, tag="rollmill.trainer_started"):
    """A trainer takes the run over; the offset of this record is its epoch."""

    run: str
    """The run."""
    config: dict[str, Any]
    """The run's configuration, as the trainer will use it."""
    start: int
    """First offset of `trajectories` that belongs to the run, for replay."""
    step: int
    """Trainer steps already in the checkpoint that it resumes from."""
    forked_from: ForkedFrom | None = None
    """The checkpoint whose weights the run began with; none if it is nobody's fork."""

    def check(self) -> None:
        """Raise ValueError for what no trainer writes: it would be the run's newest trainer for good."""
        if self.start < 0 or self.step < 0:
            raise ValueError(f"start is {self.start} and step is {self.step}; both are at least 0")


class StepDecided(Message, frozen=True, kw_only=True, tag="rollmill.step"):
    """The composition of one trainer step; written before the optimizer moves."""

    run: str
    """The run."""
    epoch: int
    """Epoch of the writer."""
    step: int
    """Number of the step, from 1."""
    position: int
    """Next offset of `trajectories` to read after the record that completed the batch."""
    members: tuple[Member, ...]
    """The batch, sorted by admission of the group, then sample."""
    digest: str
    """SHA-256 over the ordered members (`batch_digest`)."""
    advantage_digest: str
    """SHA-256 over the float32 advantages in the members' order, by turn where turns differ; empty if a model made
    them."""
    buffered: tuple[SampleRef, ...] = ()
    """Accepted completed records before `position` that no decision has used yet."""
    missing: int = 0
    """Groups fewer than the run asks for: too many in a row had been dropped."""
    phase: int | None = None
    """Phase of the curriculum for groups admitted after this step; none where it follows from the number of steps."""
    rows: tuple[RowSuccess, ...] = ()
    """What its groups achieved, where the feeder chooses rows by that."""


class GroupDropped(Message, frozen=True, kw_only=True, tag="rollmill.group_dropped"):
    """A complete group that is not trained on."""

    run: str
    """The run."""
    epoch: int
    """Epoch of the writer."""
    position: int
    """Next offset of `trajectories` to read after the record that completed the group."""
    group: str
    """The group."""
    reason: DropReason
    """Why."""
    members: tuple[SampleRef, ...]
    """Its accepted completed samples."""
    row: RowSuccess | None = None
    """What it achieved, where the feeder chooses rows by that."""


class VersionPublished(Message, frozen=True, kw_only=True, tag="rollmill.version"):
    """New weights were announced to the policy."""

    run: str
    """The run."""
    epoch: int
    """Epoch of the writer."""
    step: int
    """The step that made them; 0 is the start."""
    version: int
    """Number of the version; never used twice for other weights."""
    digest: str
    """SHA-256 of the weight file."""


class RunEnded(Message, frozen=True, kw_only=True, tag="rollmill.run_ended"):
    """The trainer is done; what it had read and not used stays unused."""

    run: str
    """The run."""
    epoch: int
    """Epoch of the writer."""
    position: int
    """Next offset of `trajectories`: later records stay unread."""
    step: int
    """Steps made."""
    reason: str
    """Why it ended."""
    unused: tuple[SampleRef, ...] = ()
    """Accepted completed records before `position` that no decision has used."""


class Branch(Message, frozen=True, kw_only=True, tag="rollmill.branch"):
    """The run goes on from an earlier step: later ones are undone, and their groups stay closed."""

    run: str
    """The run."""
    epoch: int
    """Epoch of the writer."""
    from_step: int
    """Last step that stays; 0 is the start. Live steps with a higher number, decided before this, are undone."""
    position: int
    """Next offset of `trajectories` up to which the undone steps had been decided."""
    cause: str = ""
    """Why the trainer went back by itself, which it does once; empty if a person wanted it."""
    lr_scale: float = 1.0
    """Factor on the learning rate of the steps decided after this."""


class Evaluated(Message, frozen=True, kw_only=True, tag="rollmill.evaluated"):
    """What a version achieved on the run's validation suite; written once for each evaluated step and purpose."""

    run: str
    """The run."""
    epoch: int
    """Epoch of the writer."""
    step: int
    """The step that made the version; 0 is the start."""
    version: int
    """The version that was evaluated."""
    purpose: Purpose
    """What for."""
    scores: Scores
    """The figures."""


class Alarm(Message, frozen=True, kw_only=True, tag="rollmill.alarm"):
    """A figure of the last steps lies beyond the bound of its guard; written once for each step and guard."""

    run: str
    """The run."""
    epoch: int
    """Epoch of the writer."""
    step: int
    """The step at which it was noticed."""
    guard: Guard
    """Who noticed."""
    value: float
    """The figure of that step."""
    bound: float
    """The bound, as the run's configuration says."""
    steps: int
    """Steps in a row that were beyond it."""
    action: Action
    """What follows."""
    cause: str
    """The same for a person."""
    lr_scale: float = 1.0
    """Factor on the learning rate of the steps decided after this; that of going back is the branch's own."""

    def __str__(self) -> str:
        """Return it for a person."""
        return f"run {self.run}, step {self.step}: {self.cause} ({self.guard}: {self.action.told})"


Decision = TrainerStarted | StepDecided | GroupDropped | VersionPublished | RunEnded | Branch | Evaluated | Alarm


class Fence:
    """Tells which decisions of one run count, in log order: those of the last trainer that started before them."""

    def __init__(self) -> None:
        self._epoch: int | None = None

    def passes(self, offset: int, decision: Decision) -> bool:
        """Tell whether the next decision in the log counts."""
        if isinstance(decision, TrainerStarted):
            self._epoch = offset
            return True
        return decision.epoch == self._epoch


def live_decisions(log: Iterable[tuple[int, Decision]]) -> Iterator[tuple[int, Decision]]:
    """Yield the decisions of one run that count, in log order.

    A decision counts if its epoch is the offset of the last TrainerStarted before it (`Fence`). A step
    that a resumed trainer executed again from its checkpoint is written once: re-execution writes nothing. The log may
    hold one record twice after a lost acknowledgement; the repeat says nothing new and is left out.

    Args:
        log: (offset, decision) of one run, in offset order.
    """
    fence, written = Fence(), set[Decision]()
    for offset, decision in log:
        if not fence.passes(offset, decision):
            continue
        if isinstance(decision, TrainerStarted):
            yield offset, decision
        elif decision not in written:
            written.add(decision)
            yield offset, decision


def undone_by(steps: Iterable[int], branch: Branch) -> list[int]:
    """Return which of the steps that were live before a branch it undoes."""
    return [step for step in steps if step > branch.from_step]
