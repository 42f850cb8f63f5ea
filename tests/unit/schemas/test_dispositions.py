"""Every admitted sample is in exactly one place, and whatever contradicts that is named."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.decisions import (
    Branch,
    Decision,
    DropReason,
    GroupDropped,
    Member,
    RunEnded,
    SampleRef,
    StepDecided,
    TrainerStarted,
    VersionPublished,
)
from schemas.dispositions import Disposition, Key, Ledger, dispositions
from schemas.outcome import Boundary, Cancelled, Completed, Expired, Failed, FailureKind, Outcome

DONE = Completed(components={}, reward=1.0, success=1.0, truncated=False)
LOST = Failed(kind=FailureKind.ENGINE, boundary=Boundary.POLICY, cause="gone")
ENDED = {
    Disposition.FAILED: LOST,
    Disposition.CANCELLED: Cancelled(cause="by request"),
    Disposition.EXPIRED: Expired(cause="late"),
}
DROPPED = {
    DropReason.NO_VARIANCE: Disposition.FILTERED,
    DropReason.STALE: Disposition.STALE,
    DropReason.LATE: Disposition.STALE,
    DropReason.INCOMPLETE: Disposition.INCOMPLETE,
}


@dataclass
class History:
    """A run as it may have been, written down as it happens, with the place of each sample kept by hand."""

    admitted: list[Key] = field(default_factory=list)
    accepted: dict[Key, tuple[int, Outcome]] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    places: dict[Key, Disposition] = field(default_factory=dict)
    buffer: dict[Key, int] = field(default_factory=dict)
    position: int = 0
    steps: dict[int, list[Key]] = field(default_factory=dict)

    def publish(self, key: Key, outcome: Outcome | None, offset: int) -> None:
        """Admit a sample; with an outcome, its record is in the log at this offset."""
        self.admitted.append(key)
        self.places[key] = Disposition.OPEN
        if outcome is not None:
            self.accepted[key] = (offset, outcome)
            self.places[key] = Disposition.UNREAD
        for place, end in ENDED.items():
            if outcome == end:
                self.places[key] = place

    def read_to(self, position: int) -> None:
        """Let the trainer read the log up to a position."""
        for key, (offset, outcome) in self.accepted.items():
            if self.position <= offset < position and isinstance(outcome, Completed):
                self.buffer[key] = offset
        self.position = position

    def use(self, keys: list[Key], place: Disposition) -> tuple[SampleRef, ...]:
        """Take samples out of the buffer, to this place."""
        self.places.update(dict.fromkeys(keys, place))
        return tuple(ref(key, self.buffer.pop(key)) for key in keys)

    def step(self, keys: list[Key]) -> None:
        """Decide a step on these samples."""
        members = tuple(
            Member(group=used.group, sample=used.sample, offset=used.offset, content="", reward=1.0)
            for used in self.use(keys, Disposition.TRAINED)
        )
        self.steps[len(self.decisions) + 1] = keys
        self.decisions.append(
            StepDecided(
                run="r",
                epoch=0,
                step=len(self.decisions) + 1,
                position=self.position,
                members=members,
                digest="",
                advantage_digest="",
                buffered=self.left(Disposition.BUFFERED),
            )
        )

    def drop(self, group: str, reason: DropReason) -> None:
        """Decide not to train on what has been read of a group."""
        members = self.use([key for key in self.buffer if key[0] == group], DROPPED[reason])
        self.decisions.append(
            GroupDropped(run="r", epoch=0, position=self.position, group=group, reason=reason, members=members)
        )

    def branch(self, from_step: int) -> None:
        """Undo the steps behind one."""
        for step in [step for step in self.steps if step > from_step]:
            self.places.update(dict.fromkeys(self.steps.pop(step), Disposition.ROLLED_BACK))
        self.decisions.append(Branch(run="r", epoch=0, from_step=from_step, position=self.position))

    def end(self) -> None:
        """End the run."""
        unused = self.left(Disposition.UNUSED)
        self.decisions.append(RunEnded(run="r", epoch=0, position=self.position, step=1, reason="done", unused=unused))

    def left(self, place: Disposition) -> tuple[SampleRef, ...]:
        """List what was read and not used."""
        self.places.update(dict.fromkeys(self.buffer, place))
        return tuple(ref(key, offset) for key, offset in self.buffer.items())

    def ledger(self, *, has_trainer: bool = True) -> Ledger:
        """Return what the function under test makes of it."""
        return dispositions(self.admitted, self.accepted, self.decisions, has_trainer=has_trainer)

    def amend(self, index: int, **fields) -> None:
        """Falsify one decision."""
        self.decisions[index] = msgspec.structs.replace(self.decisions[index], **fields)


def ref(key: Key, offset: int) -> SampleRef:
    """Return a reference to a record."""
    return SampleRef(group=key[0], sample=key[1], offset=offset)


def history(chance: random.Random) -> History:
    """Make a run up: some groups with all kinds of outcomes, and a trainer that reads, steps, drops and ends."""
    made = History()
    keys = [(f"g{group}", sample) for group in range(chance.randint(1, 5)) for sample in range(2)]
    chance.shuffle(keys)
    for offset, key in enumerate(keys):
        made.publish(key, chance.choice([DONE, DONE, DONE, *ENDED.values(), None]), offset * 3)
    made.decisions.append(TrainerStarted(run="r", config={}, start=0, step=0))
    for _ in range(chance.randint(0, 6)):
        made.read_to(chance.randint(made.position, 3 * len(keys)))
        if chance.random() < 0.5:
            made.step(chance.sample(list(made.buffer), chance.randint(0, len(made.buffer))))
            made.decisions.append(VersionPublished(run="r", epoch=0, step=1, version=1, digest=""))
        elif made.buffer:
            made.drop(chance.choice(list(made.buffer))[0], chance.choice(list(DropReason)))
        if chance.random() < 0.2:
            made.branch(chance.choice([0, *made.steps]))
    if chance.random() < 0.3:
        made.end()
    return made


@given(chance=st.randoms(use_true_random=False))
def test_every_sample_is_where_the_history_put_it(chance):
    """No sound history has a violation, and each admitted sample has one place."""
    made = history(chance)
    ledger = made.ledger()
    assert ledger.violations == []
    assert ledger.places == made.places


@given(chance=st.randoms(use_true_random=False))
def test_the_places_sum_to_what_was_admitted(chance):
    """Conservation: nothing is lost and nothing counts twice."""
    made = history(chance)
    assert sum(made.ledger().counts().values()) == len(made.admitted)


@given(chance=st.randoms(use_true_random=False))
def test_publishing_again_admits_nothing_new(chance):
    """A feeder that crashed publishes its last group twice; the samples are the same samples."""
    made = history(chance)
    once = made.ledger()
    made.admitted += made.admitted
    assert made.ledger() == once


@given(chance=st.randoms(use_true_random=False))
def test_without_a_trainer_completed_samples_are_unread(chance):
    """A run that only collects trajectories is conserved as well."""
    made = history(chance)
    made.decisions.clear()
    ledger = made.ledger(has_trainer=False)
    assert ledger.violations == []
    assert set(ledger.places.values()) <= {Disposition.OPEN, Disposition.UNREAD, *ENDED}


def test_counts_name_only_places_that_hold_samples():
    """The result of `check` is short."""
    assert trained().ledger().counts() == {"buffered": 1, "trained": 1, "unread": 1}


def trained() -> History:
    """Return a run with a sample in the batch, one in the buffer and one unread."""
    made = History()
    for sample, offset in enumerate((10, 20, 30)):
        made.publish(("g", sample), DONE, offset)
    made.read_to(21)
    made.step([("g", 0)])
    return made


def violations(made: History) -> str:
    """Return the only violation of a falsified history."""
    (violation,) = made.ledger().violations
    return violation


def test_a_record_that_was_read_and_is_in_no_decision_is_a_violation():
    """What the trainer passed over it must have named."""
    made = trained()
    made.amend(0, buffered=())
    assert violations(made) == "('g', 1): read at offset 20 but in no decision"
    assert ("g", 1) not in made.ledger().places


def test_a_decision_that_names_another_record_is_a_violation():
    """A batch of a superseded record was not made of what counts."""
    made = trained()
    made.accepted[("g", 0)] = (7, DONE)
    assert violations(made) == "('g', 0): trained names offset 10, the accepted record is at 7"


def test_a_sample_in_two_steps_is_a_violation():
    """Nothing counts twice."""
    made = trained()
    made.decisions.append(msgspec.structs.replace(made.decisions[0], step=2))
    assert violations(made) == "('g', 0): trained and trained"


def test_a_sample_trained_and_dropped_is_a_violation():
    """A group is either used or not."""
    made = trained()
    made.decisions.append(
        GroupDropped(run="r", epoch=0, position=21, group="g", reason=DropReason.STALE, members=(ref(("g", 0), 10),))
    )
    assert violations(made) == "('g', 0): stale and trained"


def test_the_samples_of_an_undone_step_are_rolled_back_and_what_waited_still_waits():
    """The list of an undone step stands until the next step; used again, a sample would be in two places."""
    made = trained()
    made.branch(0)
    assert made.ledger().counts() == {"rolled_back": 1, "buffered": 1, "unread": 1}

    made.read_to(31)
    made.step([("g", 2)])
    assert made.ledger().counts() == {"rolled_back": 1, "buffered": 1, "trained": 1}

    made.amend(-1, members=(*made.decisions[-1].members, *made.decisions[0].members))
    assert violations(made) == "('g', 0): trained and rolled_back"


def test_a_branch_undoes_no_step_that_comes_after_it():
    """Step numbers begin again behind the one that stays."""
    made = trained()
    made.branch(0)
    made.read_to(31)
    made.step([("g", 1)])
    made.amend(-1, step=1)
    assert made.ledger().counts() == {"rolled_back": 1, "buffered": 1, "trained": 1}
    made.branch(1)
    assert made.ledger().counts() == {"rolled_back": 1, "buffered": 1, "trained": 1}


@pytest.mark.parametrize("place", [Disposition.BUFFERED, Disposition.UNUSED])
def test_a_used_sample_that_still_waits_is_a_violation(place):
    """What was used has left the buffer."""
    made = trained()
    if place is Disposition.BUFFERED:
        made.amend(0, buffered=(ref(("g", 0), 10), ref(("g", 1), 20)))
    else:
        made.end()
        made.amend(1, unused=(ref(("g", 0), 10), ref(("g", 1), 20)))
    assert violations(made) == f"('g', 0): {place} and trained"


@pytest.mark.parametrize("place", ENDED)
def test_a_used_sample_that_was_never_completed_is_a_violation(place):
    """A failure is never a reward: nothing but a completed episode may be trained on."""
    made = trained()
    made.accepted[("g", 0)] = (10, ENDED[place])
    assert violations(made) == f"('g', 0): trained and {place}"


def test_a_used_sample_without_a_record_is_a_violation():
    """A decision speaks of what is in the log."""
    made = trained()
    del made.accepted[("g", 0)]
    assert violations(made) == "('g', 0): trained without an accepted record"


@pytest.mark.parametrize("sample", [0, 1, 2], ids=["trained", "buffered", "unread"])
def test_a_sample_that_nobody_admitted_is_a_violation(sample):
    """A record and a decision speak of what was asked for."""
    made = trained()
    made.admitted.remove(("g", sample))
    assert violations(made) == f"('g', {sample}): has a record or a decision, but was never admitted"
