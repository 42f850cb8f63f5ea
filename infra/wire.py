"""Message <-> record: headers, compression, keys and partitions, on top of the codec.

Headers follow the CloudEvents 1.0 Kafka binding in binary mode, with W3C `traceparent`. Values over COMPRESS_OVER
bytes are zstd-compressed in a thread, so that the event loop keeps the group's heartbeats; golden bytes in the docs
are uncompressed. A value too large for the log raises TooLarge before anything is sent.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import zstandard

from infra.bus import Bus, Headers, Position, Record
from infra.clock import Clock
from infra.errors import TooLarge
from schemas import codec
from schemas.control import control_key
from schemas.message import Message
from schemas.messages import Task
from schemas.partition import partition_for
from schemas.topics import Spread, Topic

M = TypeVar("M", bound=Message)

COMPRESS_OVER = 16 * 1024
"""Values larger than this many bytes are compressed."""

MAX_RECORD_BYTES = 900_000
"""Largest value after compression, in bytes: leaves room for key and headers under the broker's 1 MiB."""

ZSTD_LEVEL = 3
"""Of the compression: zstd's own default."""

FIRST_FAILED = "first-failed-at-ms"
"""Header of work that is made again: when an attempt of it failed first, in decimal."""

CONTENT_TYPE = b"application/msgpack"
"""Header `content-type` of every value."""

_SPECVERSION = ("ce_specversion", b"1.0")
_CONTENT_TYPE = ("content-type", CONTENT_TYPE)


@dataclass(frozen=True, slots=True)
class Received(Generic[M]):
    """A message together with the record it came in."""

    record: Record
    message: M
    raw: bytes
    """The uncompressed wire bytes; `schemas.batch.content_hash` is over these."""


class Packed(NamedTuple):
    """The value of a record."""

    value: bytes
    """As it goes into the log."""
    compressed: bool
    """It is zstd."""


async def pack(message: Message) -> Packed:
    """Return the value bytes of a message.

    Raises:
        TooLarge: the compressed value exceeds MAX_RECORD_BYTES, or the plain one codec.MAX_VALUE_BYTES.
        TypeError: a free-form field holds a value without a msgpack form.
    """
    plain = codec.encode(message)
    if len(plain) > codec.MAX_VALUE_BYTES:
        raise TooLarge(f"{message.wire_type()}: {len(plain)} bytes; at most {codec.MAX_VALUE_BYTES} are carried")
    if len(plain) <= COMPRESS_OVER:
        return Packed(plain, compressed=False)
    value = await asyncio.to_thread(zstandard.compress, plain, ZSTD_LEVEL)
    if len(value) > MAX_RECORD_BYTES:
        raise TooLarge(
            f"{message.wire_type()}: {len(plain)} bytes, {len(value)} compressed; the log carries at most "
            f"{MAX_RECORD_BYTES} per record. Make the transcript or the verdict smaller."
        )
    return Packed(value, compressed=True)


async def unpack(topic: Topic[M], record: Record) -> Received[M]:
    """Return the message of a record of this topic.

    Raises:
        schemas.codec.DecodeError: the bytes are not a message that belongs on this topic.
    """
    raw = record.value or b""
    if dict(record.headers).get("content-encoding") == b"zstd":
        raw = await asyncio.to_thread(_decompress, raw)
    return Received(record, codec.decode(raw, *topic.carries), raw)


def _decompress(data: bytes) -> bytes:
    try:
        # The frame header names a size that the decompressor would allocate at once: bound it before.
        if zstandard.frame_content_size(data) > codec.MAX_VALUE_BYTES:
            raise codec.DecodeError(f"decompresses to over {codec.MAX_VALUE_BYTES} bytes", data)
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=codec.MAX_VALUE_BYTES)
    except zstandard.ZstdError as error:
        raise codec.DecodeError(f"not zstd: {error}", data) from error


class Publisher:
    """Publishes messages to topics of the table, as one named service."""

    def __init__(self, bus: Bus, clock: Clock, source: str) -> None:
        self._bus = bus
        self._clock = clock
        self._header_source = ("ce_source", source.encode())

    async def publish(
        self,
        topic: Topic[M],
        message: M,
        *,
        packed: Packed | None = None,
        trace: bytes | None = None,
        partition: int | None = None,
        first_failed_ms: int | None = None,
    ) -> Position:
        """Append a message to its topic and return where it lies, once it is durable.

        Args:
            topic: where it goes; must carry this type.
            message: what is said.
            packed: its bytes, when `pack` was called before.
            trace: `traceparent` of the record that caused it; a new trace begins without one.
            partition: overrides the topic's spread, for a batch whose partition the sender has worked out.
            first_failed_ms: when an attempt of this work failed first; None if none did.

        Raises:
            TooLarge: see `pack`.
            infra.errors.BusError: not acknowledged in time.
        """
        value, compressed = packed or await pack(message)
        key, placed = _place(topic, message)
        headers = self._headers(message, trace, compressed=compressed)
        if first_failed_ms is not None:
            headers = (*headers, (FIRST_FAILED, str(first_failed_ms).encode()))
        return await self._bus.publish(
            topic.name, value, key=key, partition=placed if partition is None else partition, headers=headers
        )

    def _headers(self, message: Message, trace: bytes | None, *, compressed: bool) -> Headers:
        headers = [
            _SPECVERSION,
            ("ce_id", secrets.token_hex(8).encode()),
            ("ce_type", message.wire_type().encode()),
            self._header_source,
            ("ce_time", _rfc3339(self._clock.now_ms())),
            _CONTENT_TYPE,
            ("traceparent", trace or new_trace()),
        ]
        task = task_of(message)
        if task is not None:
            headers.append(("ce_subject", f"{task.run}/{task.group}/{task.sample}".encode()))
            headers.append(("attempt", str(task.attempt).encode()))
            headers.append(("deadline-ms", str(task.start_by_ms).encode()))
        if compressed:
            headers.append(("content-encoding", b"zstd"))
        return tuple(headers)


@lru_cache(maxsize=16)  # many records carry the same millisecond
def _rfc3339(now_ms: int) -> bytes:
    return datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds").encode()


def new_trace() -> bytes:
    """Return a fresh W3C `traceparent` header value."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01".encode()


def trace_of(record: Record) -> bytes | None:
    """Return the `traceparent` of a record, if it has one."""
    return dict(record.headers).get("traceparent")


def first_failed_of(record: Record) -> int | None:
    """Return when an attempt of the work in a record failed first, if one did."""
    text = dict(record.headers).get(FIRST_FAILED, b"")
    return int(text) if text.isdigit() and len(text) < 16 else None


def task_of(message: Message) -> Task | None:
    """Return the task that a message is or embeds, if it has one."""
    task = message if isinstance(message, Task) else getattr(message, "task", None)
    return task if isinstance(task, Task) else None


def _place(topic: Topic[Any], message: Any) -> tuple[bytes | None, int | None]:
    """Return (key, partition) of a message on a topic; partition None spreads evenly."""
    task = task_of(message)
    key = task.group.encode() if task is not None else None
    match topic.spread:
        case Spread.RUN:
            run = task.run if task is not None else message.run
            return key, partition_for(run, topic.partitions)
        case Spread.SAMPLE:
            return key, None
        case Spread.SINGLE:
            return control_key(message).encode(), 0
        case _:
            return key, None
