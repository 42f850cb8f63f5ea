"""The token records that wait for their step: as many as fit into memory, the others are read from the log again.

Deciding needs no tokens, so the assembler holds none. A record that would exceed the bound is not kept, rather than an
older one: what came first is used first. The log has everything, under the offset that the decision names; a record
that is read again must be the same to the byte, and so is the batch, whatever the bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from infra.bus import Bus
from infra.clock import Clock
from infra.errors import RollmillError
from infra.reading import read_between
from infra.trajectories import read_trajectory, trajectories_of
from schemas.batch import content_hash
from schemas.transcript import Transcript
from trainer.group import Group
from trainer.groups import Step
from trainer.terminal import Terminal

FIELD_BYTES = 512
"""What a turn or span of a token record takes beside its tokens, about, in bytes."""


class ChangedLog(RollmillError):
    """The log no longer holds the record that a decision was made on."""


class Spool:
    """Token records by offset."""

    def __init__(self, bus: Bus, clock: Clock, run: str, most_bytes: int) -> None:
        self._bus = bus
        self._clock = clock
        self._run = run
        self._most_bytes = most_bytes
        self._held: dict[int, Transcript] = {}
        self.bytes = 0
        """Bytes held, about."""
        self.read_again = 0
        """Records that were read a second time."""

    def put(self, offset: int, transcript: Transcript) -> None:
        """Keep a token record if it fits."""
        size = size_of(transcript)
        if offset not in self._held and self.bytes + size <= self._most_bytes:
            self._held[offset] = transcript
            self.bytes += size

    def drop(self, offsets: Iterable[int]) -> None:
        """Forget token records that no step will use."""
        for offset in offsets:
            transcript = self._held.pop(offset, None)
            if transcript is not None:
                self.bytes -= size_of(transcript)

    def keep(self, offsets: Collection[int]) -> None:
        """Forget all others: what a step leaves behind is all that can still be used."""
        self.drop([offset for offset in self._held if offset not in offsets])

    async def fill(self, step: Step) -> Step:
        """Return a step with its token records; a sample that was graded without any stays without.

        Raises:
            ChangedLog: a record that is not held is no longer in the log as it was.
            infra.errors.OffsetLost: retention has removed it.
        """
        wanted = {t.offset: t for t in step.terminals}
        found: dict[int, Transcript | None] = {o: self._held[o] for o in wanted if o in self._held}
        for run in _runs(sorted(wanted.keys() - found.keys())):
            found.update(await self._read(run, wanted))
        self.keep({ref.offset for ref in step.buffered})
        return replace(step, groups=tuple(_filled(group, found) for group in step.groups))

    async def _read(self, offsets: list[int], wanted: dict[int, Terminal]) -> dict[int, Transcript | None]:
        """Read records again that lie behind each other, with what lies between them."""
        partition = trajectories_of(self._run)
        found: dict[int, Transcript | None] = {}
        async for record in read_between(self._bus, self._clock, {partition: offsets[0]}, {partition: offsets[-1] + 1}):
            if record.offset not in wanted:
                continue
            received = await read_trajectory(record, self._run, self._bus)
            if received is None or content_hash(received.raw) != wanted[record.offset].content:
                break
            found[record.offset] = received.message.transcript
        missing = sorted(set(offsets) - found.keys())
        if missing:
            raise ChangedLog(
                f"offset {missing[0]} of {partition} was read for run {self._run!r} before and no longer holds the "
                f"same record: the log was changed or cut; restore it, or fork the run from its last checkpoint"
            )
        self.read_again += len(found)
        return found


def _filled(group: Group, found: Mapping[int, Transcript | None]) -> Group:
    return replace(group, completed=tuple(replace(t, transcript=found[t.offset]) for t in group.completed))


def size_of(transcript: Transcript) -> int:
    """Return about how many bytes a token record takes in memory."""
    arrays = len(transcript.tokens) + len(transcript.mask) + len(transcript.logprobs)
    return arrays + FIELD_BYTES * (1 + len(transcript.spans) + len(transcript.turns))


def _runs(offsets: list[int], gap: int = 64) -> list[list[int]]:
    """Split ascending offsets where more than a gap lies between two: reading across a small one is cheaper."""
    runs: list[list[int]] = []
    for offset in offsets:
        if runs and offset - runs[-1][-1] <= gap:
            runs[-1].append(offset)
        else:
            runs.append([offset])
    return runs
