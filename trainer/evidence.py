"""What recorded steps rest on, as it lies in the log now: the record of each member, and an end of each sibling.

A record that was changed is named by the sample that was decided on, whatever it says now; what its change does to
others comes after it. Of members the content is recorded, of a sibling that did not complete only that it had ended.
Pure: whoever compares a log with its own decisions feeds the run's terminal records in offset order (`replay.py`,
`story.py`). This file does not know rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from schemas.arbiter import Arbiter, Ruling
from schemas.decisions import Member, StepDecided
from trainer.terminal import Terminal


class Change(NamedTuple):
    """A sample of a step whose end is not what it was."""

    group: str
    sample: int
    what: str
    """What became of it, for a person; goes on after the sample's name."""


class _Lying(NamedTuple):
    """A readable record of the run, without what is measured in it."""

    group: str
    sample: int
    samples: int
    content: str


class Evidence:
    """The terminal records of one run, as far as they were fed."""

    def __init__(self) -> None:
        self._arbiter = Arbiter()
        self._at: dict[int, _Lying] = {}

    def add(self, record: Terminal) -> Ruling:
        """Take the next record, return what it means."""
        self._at[record.offset] = _Lying(record.group, record.sample, record.samples, record.content)
        return self._arbiter.rule(record.group, record.sample, record.digest, record.offset)

    def changes(self, step: StepDecided) -> Iterator[Change]:
        """Yield what is no longer as a step was decided on, causes before their consequences."""
        for check in (self._bytes, self._outcome):
            for member in step.members:
                what = check(member)
                if what:
                    yield Change(member.group, member.sample, what)
        yield from self._unended(step)

    def _bytes(self, member: Member) -> str:
        """Return what became of a member's record; empty if it is the same to the byte."""
        found = self._at.get(member.offset)
        if found is None:
            return f"its record at offset {member.offset} cannot be read any more, or is another run's"
        if found.content == member.content:
            return ""
        now = f"{found.group}/{found.sample}"
        other = "" if now == f"{member.group}/{member.sample}" else f", as the end of {now}"
        return (
            f"its record at offset {member.offset} had content {member.content[:12]}, it has {found.content[:12]}"
            f"{other}: its bytes were changed"
        )

    def _outcome(self, member: Member) -> str:
        """Return why a member's record, be it the same, is not its sample's outcome; empty if it is."""
        accepted = self._arbiter.accepted(member.group)
        first = accepted.get(member.sample)
        if first == member.offset:
            return ""
        before = min(accepted.values()) if first is None else first
        why = "has the sample's first outcome" if first is not None else "came first and names another task"
        return f"its record at offset {member.offset} no longer counts: offset {before} {why}"

    def _unended(self, step: StepDecided) -> Iterator[Change]:
        """Yield the siblings of members that had all ended when the step was decided, and now have not."""
        sizes = {m.group: found.samples for m in step.members if (found := self._at.get(m.offset)) is not None}
        for group, size in sizes.items():
            accepted = self._arbiter.accepted(group)
            ended = {sample for sample, offset in accepted.items() if offset < step.position}
            sample = next((number for number in range(size) if number not in ended), None)
            if sample is not None:
                yield Change(group, sample, f"it had ended before offset {step.position}, and no record says so now")
