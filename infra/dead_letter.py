"""Dead letters: records that were given up, kept in `dead` with their original bytes and headers and the reason.

Three kinds of records come here. Poison, which nobody can read or pass on, comes at once: the same bytes would be as
unreadable again, and no sample is known that a terminal record could end. A record whose sample ended as failed comes
with its terminal record, so that its work can be repeated once the cause is mended (`rollmill dead redrive`). A
terminal record of another task than the one that has its id ends no sample, and comes so that a person hears of it.

The stream behind a record goes on, so burying must not fail on what it buries. The reasons go in first. A record's own
headers or key that leave them no room are dropped and named in `x-dropped`; a value that does not fit beside what is
left is cut, with its size in `x-cut-from`; one that is null becomes empty, since a log takes no record that has neither
key nor value. Reading is as tolerant: anyone may have written a header, and none, or nonsense, is not an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from infra.blobs import BlobsAway
from infra.bus import Bus, Headers, Record, TopicPartition
from infra.claims import refresh
from infra.clock import Clock
from infra.reading import read_between
from infra.wire import task_of, unpack
from schemas.codec import DecodeError
from schemas.limits import BURIED_BYTES
from schemas.message import Message
from schemas.topics import DEAD, HOUR_MS, TABLE, Topic

CAUSE_BYTES = 2_000
"""Longest cause kept in a header, in bytes."""

POISON = "poison"
"""Kind of a record that is no message of its topic."""

TOO_LARGE = "too_large"
"""Kind of a record whose output the log cannot carry."""

CRASHED = "crashed"
"""Kind of a record that ended its own process, twice."""

NOT_STORED = "not_stored"
"""Kind of a record that the sink cannot store; the stages dealt with it all the same."""

CONFLICT = "conflict"
"""Kind of a terminal record that speaks of another task than the one that has its id; the sink writes these alone."""

SKEW_MS = HOUR_MS
"""A letter may bear a time that is so much earlier than its record's, milliseconds: clocks differ."""

HEADER_FRAMING = 6
"""Bytes that Kafka writes around a header: two lengths. Without them a record of countless empty headers would seem to
fit."""

TOPICS: Mapping[str, Topic[Message]] = {topic.name: topic for topic in TABLE}
"""Name -> topic, to read a record as what it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Why a record is given up."""

    stage: str
    """The service that gives up."""
    cause: str
    """The error, for a person."""
    kind: str = POISON
    """A FailureKind, or one of the kinds above."""
    attempts: int | None = None
    """Attempts made, the last one included; None where nothing was attempted."""
    first_failed_ms: int | None = None
    """When the first of them failed, milliseconds since the epoch, where that is known."""


async def bury(bus: Bus, clock: Clock, record: Record, death: Death) -> None:
    """Append a record to `dead`, in the partition it came from, and return once that is durable."""
    reasons = _reasons(record, death, clock.now_ms())
    key, own, dropped = _fitting(record, BURIED_BYTES - _size(None, reasons))
    headers: Headers = (*own, *reasons)
    if dropped:
        headers = (*headers, ("x-dropped", dropped.encode()))
    value, room = record.value or b"", max(0, BURIED_BYTES - _size(key, headers))
    if len(value) > room:
        headers = (*headers, ("x-cut-from", str(len(value)).encode()))
    await refresh(record, bus)  # the copy may outlive the record by far
    partition = record.partition % DEAD.partitions
    await bus.publish(DEAD.name, value[:room], key=key, partition=partition, headers=headers)


async def in_dead(bus: Bus, clock: Clock, tp: TopicPartition, since_ms: int, kind: str) -> set[int]:
    """Return the offsets of a partition whose records have a letter of a kind, written since then.

    For whoever reads a partition again after a restart and must not bury twice.
    """
    grave = TopicPartition(DEAD.name, tp.partition % DEAD.partitions)
    begin = (await bus.offsets_since(grave.topic, max(0, since_ms)))[grave.partition]
    end = (await bus.end_offsets(grave.topic))[grave.partition]
    found = set()
    async for record in read_between(bus, clock, {grave: begin}, {grave: end}):
        letter = DeadLetter(record)
        if letter.death.kind == kind and letter.original.tp == tp:
            found.add(letter.original.offset)
    return found


def _fitting(record: Record, room: int) -> tuple[bytes | None, Headers, str]:
    """Return as much of a record's key and headers as so many bytes hold, and what that leaves out."""
    key, own = record.key, record.headers
    choices: tuple[tuple[bytes | None, Headers, str], ...] = (
        (key, own, ""),
        (key, (), "headers"),
        (None, own, "key"),
    )
    return next((choice for choice in choices if _size(*choice[:2]) <= room), (None, (), "headers,key"))


def _size(key: bytes | None, headers: Headers) -> int:
    return len(key or b"") + sum(len(name.encode()) + len(text) + HEADER_FRAMING for name, text in headers)


def _reasons(record: Record, death: Death, now_ms: int) -> Headers:
    texts = {
        "x-orig-topic": record.topic,
        "x-orig-partition": str(record.partition),
        "x-orig-offset": str(record.offset),
        "x-orig-timestamp-ms": str(record.timestamp_ms),
        "x-stage": death.stage,
        "x-kind": death.kind,
        "x-attempts": None if death.attempts is None else str(death.attempts),
        "x-first-failed-at-ms": None if death.first_failed_ms is None else str(death.first_failed_ms),
        "x-failed-at-ms": str(now_ms),
    }
    cause = death.cause.encode("utf-8", "backslashreplace")[:CAUSE_BYTES]
    return (*((name, text.encode()) for name, text in texts.items() if text is not None), ("x-cause", cause))


@dataclass(frozen=True)
class DeadLetter:
    """A record of `dead`, read."""

    record: Record
    """As it lies in `dead`."""
    bus: Bus | None = None
    """The log, which redeems claim checks; without it their messages cannot be read."""

    @property
    def id(self) -> str:
        """Its name on the command line: `partition:offset` in `dead`."""
        return f"{self.record.partition}:{self.record.offset}"

    @cached_property
    def original(self) -> Record:
        """The record that was given up, as it lay; an empty value may have been null."""
        return Record(
            topic=self._text("x-orig-topic"),
            partition=self._number("x-orig-partition") or 0,
            offset=self._number("x-orig-offset") or 0,
            timestamp_ms=self._number("x-orig-timestamp-ms") or 0,
            key=self.record.key,
            value=self.record.value,
            headers=self.record.headers[: self._added],
        )

    @property
    def death(self) -> Death:
        """Why it was given up, as far as its headers say."""
        return Death(
            stage=self._text("x-stage"),
            cause=self._text("x-cause"),
            kind=self._text("x-kind"),
            attempts=self._number("x-attempts"),
            first_failed_ms=self._number("x-first-failed-at-ms"),
        )

    @property
    def died_ms(self) -> int:
        """When it was given up, milliseconds since the epoch."""
        return self._number("x-failed-at-ms") or self.record.timestamp_ms

    @property
    def cut_from(self) -> int | None:
        """How many bytes its value had, if it was cut."""
        return self._number("x-cut-from")

    @property
    def dropped(self) -> str:
        """What of it could not be kept: `headers`, `key`, or `headers,key`; empty as a rule."""
        return self._text("x-dropped")

    async def message(self) -> Message:
        """Return its message, read as a record of the topic that it came from.

        Raises:
            schemas.codec.DecodeError: it is none, or it came from nowhere that is known.
            infra.blobs.BlobsAway: it lies in the log's blob store, which does not answer.
        """
        original = self.original
        topic = TOPICS.get(original.topic)
        if topic is None:
            raise DecodeError(f"its headers name {original.topic!r}, which is no topic", original.value or b"")
        if self.cut_from is not None:
            kept = len(original.value or b"")
            raise DecodeError(f"{kept} of its {self.cut_from} bytes are kept: it was cut", original.value or b"")
        return (await unpack(topic, original, self.bus)).message

    async def sample(self) -> str:
        """Return the sample that it speaks of, `run/group/sample`; empty if nothing says so."""
        said = dict(self.original.headers).get("ce_subject", b"").decode(errors="replace")
        if said:
            return said
        try:
            task = task_of(await self.message())
        except (DecodeError, BlobsAway):
            return ""
        return f"{task.run}/{task.group}/{task.sample}" if task is not None else ""

    @cached_property
    def _added(self) -> int:
        """Where the headers of `bury` begin: behind the last header that could be the record's own."""
        starts = [at for at, (name, _) in enumerate(self.record.headers) if name == "x-orig-topic"]
        return starts[-1] if starts else len(self.record.headers)

    @cached_property
    def _reasons(self) -> dict[str, bytes]:
        return dict(self.record.headers[self._added :])

    def _text(self, name: str) -> str:
        return self._reasons.get(name, b"").decode(errors="replace")

    def _number(self, name: str) -> int | None:
        digits = self._reasons.get(name, b"")
        return int(digits) if digits.isdigit() and len(digits) < 20 else None
