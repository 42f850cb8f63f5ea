"""Current state, read from the compacted `control` topic: the latest record of each key.

Numbers in control records are cumulative and a trainer's epoch only grows, so a record that is older than what is
known (lower epoch, smaller number, another manifest than the first) is ignored wherever it lies in the log. Reading
begins at the start of the topic and reaches its end before `start` returns, so a service never works with a state it
has not read.

A record that is none (bytes that cannot be read, a key that is not its message's, a claim check, which this topic has
none of) says nothing: what was known of its key stays. Everybody who looks at `control` meets it for as long as it lies
there, so a view only mentions it; the reaper buries it (`producers/control_letters.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from infra.bus import Bus, Reader, Record, TopicPartition
from infra.claims import claimed
from infra.clock import Clock, wait_for
from infra.errors import WaitTimeout
from infra.side_by_side import alongside
from infra.wire import unpack
from schemas.codec import DecodeError
from schemas.control import Breaker, Control, Credit, Cursor, PolicyVersion, RunManifest, control_key
from schemas.topics import CONTROL

log = logging.getLogger(__name__)

C = TypeVar("C", bound=Control)

CATCH_UP_S = 30.0
"""Longest wait for the end of the topic at start, seconds."""

POLL_S = 0.5
"""One poll lasts at most this long, seconds."""

BATCH = 500
"""Most records of one poll."""

SHOWN_BYTES = 80
"""So much of a key is shown: anybody may have written it, of any length."""

_TP = TopicPartition(CONTROL.name, 0)


def tell_nobody(keys: list[str]) -> None:
    """Do nothing: for whoever asks the view instead."""


def pass_over(record: Record, reason: str) -> None:
    """Do nothing about a record that cannot be used: the reaper does."""


class ControlView:
    """The latest control record of each key."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        *,
        told: Callable[[list[str]], None] = tell_nobody,
        refused: Callable[[Record, str], None] = pass_over,
    ) -> None:
        """Build a view.

        Args:
            bus: the log.
            clock: for limits.
            told: called with the keys that changed, once per batch of records, also while the view starts.
            refused: called with each record that cannot be used, and why.
        """
        self._bus = bus
        self._clock = clock
        self._told = told
        self._refused = refused
        self._records: dict[str, Control] = {}
        self._offsets: dict[str, int] = {}
        """Where the latest record of a key lies."""
        self._overruled: set[str] = set()
        self._written_ms: dict[str, int] = {}
        self._reader: Reader | None = None
        self._taken_to = 0
        """All records before this offset are in the view."""
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Read what is there. Raises WaitTimeout when the end is not reached in time."""
        begin = await self._bus.begin_offsets(CONTROL.name)
        end = (await self._bus.end_offsets(CONTROL.name))[0]
        self._reader = await self._bus.read({_TP: begin[0]})
        until = self._clock.monotonic() + CATCH_UP_S
        while self._reader.position(_TP) < end:
            await self._poll(self._reader)
            if self._clock.monotonic() > until:
                at = self._reader.position(_TP)
                raise WaitTimeout(f"waited {CATCH_UP_S:g} s for the end of `control` at {end}; read up to {at}")

    async def follow(self) -> None:
        """Keep reading until cancelled; call `start` first."""
        assert self._reader is not None, "start the view before following it"
        while True:
            await self._poll(self._reader)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Start, keep reading while the block runs, and close.

        Whoever waits for a change would wait for ever once nobody reads: a reader that breaks cancels the block, and
        its error leaves it.
        """
        try:
            await self.start()
            async with alongside(self.follow()):
                yield
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop reading."""
        if self._reader is not None:
            await self._reader.close()

    def get(self, key: str, kind: type[C]) -> C | None:
        """Return the latest record of a key, or None."""
        record = self._records.get(key)
        return record if isinstance(record, kind) else None

    def all(self, kind: type[C]) -> list[C]:
        """Return the latest records of one kind, by key."""
        return [record for _, record in sorted(self._records.items()) if isinstance(record, kind)]

    def offset(self, key: str) -> int:
        """Return where the latest record of a key lies; -1 if there is none."""
        return self._offsets.get(key, -1)

    def overruled(self, key: str) -> bool:
        """Tell whether the log's last record of a key is another one than what counts: compaction would keep it."""
        return key in self._overruled

    def written_ms(self, key: str) -> int | None:
        """Return when the latest record of a key was written, milliseconds since the epoch; None if there is none."""
        return self._written_ms.get(key)

    async def caught_up(self) -> bool:
        """Tell whether all that is in the topic at this moment is in the view."""
        return self._taken_to >= (await self._bus.end_offsets(CONTROL.name))[0]

    async def changed(self, timeout_s: float) -> None:
        """Return at the next change, or after timeout_s."""
        self._changed.clear()
        await wait_for(self._changed, self._clock, timeout_s)

    async def _poll(self, reader: Reader) -> None:
        changed = [key for record in await reader.poll(BATCH, POLL_S) if (key := await self._take(record)) is not None]
        self._taken_to = reader.position(_TP)
        if changed:
            self._changed.set()
            self._told(changed)

    async def _take(self, record: Record) -> str | None:
        """Take a record and return its key; None if it says nothing."""
        key = (record.key or b"").decode(errors="replace")
        if record.value is None:
            self._records.pop(key, None)
            self._offsets.pop(key, None)
            self._overruled.discard(key)
            self._written_ms.pop(key, None)
            return key
        try:
            message = await _read(record)
        except DecodeError as error:
            log.info("`control` offset %d under key %s is ignored: %s", record.offset, shown(record.key), error)
            if key in self._records:
                self._overruled.add(key)
            self._refused(record, str(error))
            return None
        self._judge(key, message, record)
        return key

    def _judge(self, key: str, message: Control, record: Record) -> None:
        known = self._records.get(key)
        self._overruled.discard(key)
        if not _older(message, known):
            self._records[key] = message
            self._offsets[key], self._written_ms[key] = record.offset, record.timestamp_ms
        elif message != known:
            self._overruled.add(key)


async def _read(record: Record) -> Control:
    """Return what a record says. Raises DecodeError when that is nothing."""
    raw = record.value or b""
    if claimed(record) is not None:
        raise DecodeError("a claim check: `control` keeps its records for ever, the blob store does not", raw)
    message = (await unpack(CONTROL, record)).message
    if control_key(message).encode() != record.key:
        raise DecodeError(f"a {message.wire_type()} whose key is {shown(control_key(message).encode())}", raw)
    return message


def shown(key: bytes | None) -> str:
    """Return a key for a person: on one line, and not longer than that."""
    if key is None:
        return "none"
    text = repr(key[:SHOWN_BYTES].decode(errors="backslashreplace"))
    return text if len(key) <= SHOWN_BYTES else f"{text}... ({len(key)} bytes)"


async def control_now(bus: Bus, clock: Clock) -> ControlView:
    """Return what `control` says now, not followed any further. Raises WaitTimeout when its end is not reached."""
    view = ControlView(bus, clock)
    try:
        await view.start()
    finally:
        await view.close()
    return view


def _place(cursor: Cursor) -> tuple[int, int, bool]:
    """Return how far a feeder is; what it takes next comes behind what it has admitted."""
    return cursor.admitted, max(cursor.admitted, cursor.passed), cursor.taking


def _older(new: Control, known: Control | None) -> bool:
    """Tell whether a record says less than what is known."""
    match new, known:
        case Credit(), Credit():
            return (new.epoch, new.admit_up_to) < (known.epoch, known.admit_up_to)
        case PolicyVersion(), PolicyVersion():
            return (new.epoch, new.version) < (known.epoch, known.version)
        case Cursor(), Cursor():
            return _place(new) < _place(known)
        case RunManifest(), RunManifest():
            return True
        case Breaker(), Breaker():
            # Earlier and with no more open time: a late record. A worker whose clock was set back has more open time
            # by then; one that begins again under the name of another counts from zero, at a later time.
            return new.at_ms < known.at_ms and new.open_ms <= known.open_ms
        case _:
            return False
