"""Where each sample of a run went: exactly one bucket each, each from a row of its own.

This is the definition that `rollmill check` proves by SQL over ClickHouse; here it is over lists, for replay and for
tests that compare the two. Only `open` and `unread` may be inferred from the absence of a record; every other bucket
names the record that put the sample there. A sample that fits no bucket, or two, is a violation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from schemas.decisions import (
    Alarm,
    Branch,
    Decision,
    DropReason,
    Evaluated,
    GroupDropped,
    RunEnded,
    SampleRef,
    StepDecided,
    TrainerStarted,
    VersionPublished,
    undone_by,
)
from schemas.outcome import Cancelled, Expired, Failed, Outcome

Key = tuple[str, int]
"""(group, sample)."""


REPLAYED = "replay"
"""Stage of a terminal record that brings its sample along: its task was admitted in the run that was graded anew, and
lies in no topic of this one's."""


class Disposition(StrEnum):
    """The one place where a sample is."""

    OPEN = "open"
    """It has no outcome yet."""
    FAILED = "failed"
    """Its accepted record says that the system failed it."""
    CANCELLED = "cancelled"
    """Its accepted record says that it was withdrawn."""
    EXPIRED = "expired"
    """Its accepted record says that its time ran out."""
    BUFFERED = "buffered"
    """The last step names it as read and not yet used."""
    TRAINED = "trained"
    """It is a member of a step."""
    FILTERED = "filtered"
    """Its group was dropped: all siblings succeeded alike."""
    STALE = "stale"
    """Its group was dropped: its tokens lag too much."""
    INCOMPLETE = "incomplete"
    """Its group was dropped: too few siblings completed."""
    ROLLED_BACK = "rolled_back"
    """It is a member of a step that a branch has undone; its group stays closed."""
    UNREAD = "unread"
    """It has an outcome, behind the position up to which the trainer has accounted."""
    UNUSED = "unused"
    """The end of the run names it as read and never used."""


@dataclass
class Ledger:
    """The result: one disposition per sample, and what contradicts the rules."""

    places: dict[Key, Disposition] = field(default_factory=dict)
    """Where each sample is; a sample that fits no bucket is left out."""
    violations: list[str] = field(default_factory=list)
    """What contradicts the rules, in words."""

    def counts(self) -> dict[str, int]:
        """Return samples per disposition."""
        found = dict.fromkeys((place.value for place in Disposition), 0)
        for place in self.places.values():
            found[place.value] += 1
        return {name: count for name, count in found.items() if count}


DROPPED = {
    DropReason.NO_VARIANCE: Disposition.FILTERED,
    DropReason.STALE: Disposition.STALE,
    DropReason.LATE: Disposition.STALE,
    DropReason.INCOMPLETE: Disposition.INCOMPLETE,
}
"""Where the samples of a dropped group are."""

Use = tuple[Disposition, int]
"""(place, offset of the record that the decision names)."""

_ENDED: dict[type[Outcome], Disposition] = {
    Failed: Disposition.FAILED,
    Cancelled: Disposition.CANCELLED,
    Expired: Disposition.EXPIRED,
}
"""Outcomes that no trainer may use."""


def dispositions(
    admitted: Iterable[Key],
    accepted: Mapping[Key, tuple[int, Outcome]],
    decisions: Iterable[Decision],
    *,
    has_trainer: bool,
) -> Ledger:
    """Return where every admitted sample of a run is.

    Args:
        admitted: samples that were published, or brought along by their REPLAYED record.
        accepted: sample -> (offset, outcome) of its accepted record.
        decisions: the run's live decisions in log order.
        has_trainer: a trainer has started on the run.
    """
    ledger = Ledger()
    uses = _Uses(ledger.violations)
    for decision in decisions:
        uses.take(decision)
    used, position = {**uses.waiting, **uses.final}, uses.position
    wanted = dict.fromkeys(admitted)
    for key in wanted:
        use, record = used.pop(key, None), accepted.get(key)
        if record is None:
            ledger.places[key] = Disposition.OPEN
            if use is not None:
                ledger.violations.append(f"{key}: {use[0]} without an accepted record")
            continue
        place = _place(key, record, use, position if has_trainer else 0, ledger)
        if place is not None:
            ledger.places[key] = place
    strangers = sorted((used.keys() | accepted.keys()) - wanted.keys())
    ledger.violations += [f"{key}: has a record or a decision, but was never admitted" for key in strangers]
    return ledger


def _place(key: Key, record: tuple[int, Outcome], use: Use | None, position: int, ledger: Ledger) -> Disposition | None:
    offset, outcome = record
    ended = _ENDED.get(type(outcome))
    if ended is not None:
        if use is not None:
            ledger.violations.append(f"{key}: {use[0]} and {ended}")
        return ended
    if use is None:
        if offset >= position:
            return Disposition.UNREAD
        ledger.violations.append(f"{key}: read at offset {offset} but in no decision")
        return None
    place, named = use
    if named != offset:
        ledger.violations.append(f"{key}: {place} names offset {named}, the accepted record is at {offset}")
    return place


class _Uses:
    """What the live decisions say of samples, taken in log order."""

    def __init__(self, violations: list[str]) -> None:
        self.final: dict[Key, Use] = {}
        self.waiting: dict[Key, Use] = {}
        self.position = 0
        self._violations = violations
        self._steps: dict[int, list[Key]] = {}
        """Live step -> its samples."""

    def take(self, decision: Decision) -> None:
        """Take the next live decision."""
        match decision:
            case StepDecided():
                refs = [SampleRef(group=m.group, sample=m.sample, offset=m.offset) for m in decision.members]
                self._settle(Disposition.TRAINED, refs)
                self._steps[decision.step] = [(ref.group, ref.sample) for ref in refs]
                self._wait(Disposition.BUFFERED, decision.buffered, decision.position)
            case GroupDropped():
                self._settle(DROPPED[decision.reason], decision.members)
            case RunEnded():
                self._wait(Disposition.UNUSED, decision.unused, decision.position)
            case Branch():
                for step in undone_by(list(self._steps), decision):
                    for key in self._steps.pop(step):
                        self.final[key] = (Disposition.ROLLED_BACK, self.final[key][1])
            case TrainerStarted() | VersionPublished() | Evaluated() | Alarm():
                pass

    def _settle(self, place: Disposition, refs: Iterable[SampleRef]) -> None:
        for ref in refs:
            self._refuse_second(place, ref)
            self.final[ref.group, ref.sample] = (place, ref.offset)

    def _wait(self, place: Disposition, refs: Iterable[SampleRef], position: int) -> None:
        # Each list replaces the one before it: what it no longer names must have been used meanwhile. That of an
        # undone step stands until the next one: what waited then still waits.
        self.waiting.clear()
        self.position = position
        for ref in refs:
            self._refuse_second(place, ref)
            self.waiting[ref.group, ref.sample] = (place, ref.offset)

    def _refuse_second(self, place: Disposition, ref: SampleRef) -> None:
        key = (ref.group, ref.sample)
        if key in self.final:
            self._violations.append(f"{key}: {place} and {self.final[key][0]}")
