"""Message <-> record: headers, compression, claim checks, keys and partitions, on top of the codec.

Headers follow the CloudEvents 1.0 Kafka binding in binary mode, with W3C `traceparent`. Values over COMPRESS_OVER
bytes are zstd-compressed in a thread, so that the event loop keeps the group's heartbeats; golden bytes in the docs
are uncompressed. What a record cannot hold lies in a blob, and the record holds a claim check (`claims.py`); readers
get the message as if nothing had happened. A message too large for that raises TooLarge before anything is sent.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import zstandard

from infra import claims
from infra.blobs import BlobStore
from infra.bus import Bus, Headers, Position, Record
from infra.clock import Clock
from infra.errors import TooLarge
from schemas import codec
from schemas.claim import ZSTD
from schemas.control import control_key
from schemas.limits import COMPRESS_OVER, INLINE_BYTES, RECORD_BYTES, VALUE_BYTES
from schemas.message import Message
from schemas.messages import Task
from schemas.partition import partition_for
from schemas.topics import Spread, Topic

M = TypeVar("M", bound=Message)

ZSTD_LEVEL = 3
"""Of the compression: zstd's own default."""

FIRST_FAILED = "first-failed-at-ms"
"""Header of work that is made again: when an attempt of it failed first, in decimal."""

CONTENT_TYPE = b"application/msgpack"
"""Header `content-type` of every value."""

_SPECVERSION = ("ce_specversion", b"1.0")
_CONTENT_TYPE = ("content-type", CONTENT_TYPE)

TRACE_BYTES = 256
"""Longest `traceparent` that is passed on, in bytes; one has 55 today, and may grow."""


class Received(msgspec.Struct, Generic[M], frozen=True):
    """A message together with the record it came in."""

    record: Record
    message: M
    raw: bytes
    """The uncompressed wire bytes; `schemas.batch.content_hash` is over these."""


class Packed(NamedTuple):
    """The value of a record, with what tells a reader how to read it."""

    value: bytes
    """As it goes into the log."""
    headers: Headers = ()
    """`content-encoding` or `claim-check`, where it is not the plain message."""


async def pack(message: Message, blobs: BlobStore | None = None, *, beside: Callable[[], int] = lambda: 0) -> Packed:
    """Return the value of a message, once what the record cannot hold is in the store.

    Args:
        message: what is said.
        blobs: the log's store; None where a claim check is not possible.
        beside: returns the bytes of key and other headers; asked of large values only.

    Raises:
        TooLarge: the message exceeds VALUE_BYTES, or its record INLINE_BYTES and there is no store.
        TypeError: a free-form field holds a value without a msgpack form.
        infra.blobs.BlobsAway: the store does not take it.
    """
    plain = codec.encode(message)
    if len(plain) > VALUE_BYTES:
        raise TooLarge(
            f"{message.wire_type()}: {len(plain)} bytes; at most {VALUE_BYTES} are carried. Make the payload, the "
            "transcript or the verdict smaller"
        )
    if len(plain) <= COMPRESS_OVER:
        return Packed(plain)
    value, encoding = await _smaller(plain)
    headers: Headers = (("content-encoding", encoding.encode()),) if encoding else ()
    if len(value) + _size(None, headers) + beside() <= INLINE_BYTES:
        return Packed(value, headers)
    if blobs is None:
        raise TooLarge(
            f"{message.wire_type()}: {len(plain)} bytes, {len(value)} as sent; a record holds at most {INLINE_BYTES} "
            "with its key and headers. To send more, set bus.blobs to a directory that every service sees (`control` "
            "takes no more, since it keeps its records for ever and the store does not)"
        )
    return Packed(*await claims.check_in(blobs, value, encoding))


async def unpack(topic: Topic[M], record: Record, bus: Bus | None = None) -> Received[M]:
    """Return the message of a record of this topic.

    Args:
        topic: where the record lies.
        record: as it lies there.
        bus: the log it was read from, whose store a claim check is redeemed at.

    Raises:
        schemas.codec.DecodeError: the bytes are not a message that belongs on this topic, or their blob is lost.
        infra.blobs.BlobsAway: the record is a claim check, and the store does not answer.
    """
    raw = record.value or b""
    compressed = record.header("content-encoding") == ZSTD.encode()
    if claims.claimed(record) is not None:
        raw, encoding = await claims.redeem(record, bus)
        compressed = encoding == ZSTD
    if compressed:
        raw = await asyncio.to_thread(_decompress, raw)
    return Received(record, codec.decode(raw, *topic.carries), raw)


async def _smaller(plain: bytes) -> tuple[bytes, str]:
    """Return a value with its encoding: compressed if that helps."""
    squeezed = await asyncio.to_thread(zstandard.compress, plain, ZSTD_LEVEL)
    return (squeezed, ZSTD) if len(squeezed) < len(plain) else (plain, "")


def _decompress(data: bytes) -> bytes:
    try:
        # The frame header names a size that the decompressor would allocate at once: bound it before.
        if zstandard.frame_content_size(data) > VALUE_BYTES:
            raise codec.DecodeError(f"decompresses to over {VALUE_BYTES} bytes", data)
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=VALUE_BYTES)
    except zstandard.ZstdError as error:
        raise codec.DecodeError(f"not zstd: {error}", data) from error


class Publisher:
    """Publishes messages to topics of the table, as one named service."""

    def __init__(self, bus: Bus, clock: Clock, source: str) -> None:
        self._bus = bus
        self._clock = clock
        self._header_source = ("ce_source", source.encode())
        # Counted from anywhere: unique, without asking the system for chance at every record.
        self._ids = itertools.count(secrets.randbits(63))

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
        value, how = packed or await self.pack(topic, message)
        key, placed = _place(topic, message)
        headers = (*self._headers(message, trace), *how)
        if first_failed_ms is not None:
            headers = (*headers, (FIRST_FAILED, str(first_failed_ms).encode()))
        whole = len(value) + _size(key, headers)
        if whole > RECORD_BYTES:  # a claim check replaces the value alone
            raise TooLarge(f"{message.wire_type()}: {whole} bytes with its key and headers; shorten the names in it")
        return await self._bus.publish(
            topic.name, value, key=key, partition=placed if partition is None else partition, headers=headers
        )

    async def pack(self, topic: Topic[M], message: M) -> Packed:
        """Return the value of a message for a topic; see the function `pack`."""
        # A compacted topic keeps its records for ever, and the store no blob that long.
        blobs = None if topic.compacted else self._bus.blobs
        return await pack(message, blobs, beside=partial(self._beside, topic, message))

    def _beside(self, topic: Topic[M], message: M) -> int:
        """Return the bytes of a message's key and headers."""
        key, _ = _place(topic, message)
        return _size(key, self._headers(message, None))

    def _headers(self, message: Message, trace: bytes | None) -> Headers:
        headers = [
            _SPECVERSION,
            ("ce_id", b"%016x" % next(self._ids)),
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
        return tuple(headers)


def _rfc3339(now_ms: int) -> bytes:
    seconds, ms = divmod(now_ms, 1000)
    return b"%b.%03d+00:00" % (_to_the_second(seconds), ms)


@lru_cache(maxsize=16)  # many records carry the same second
def _to_the_second(seconds: int) -> bytes:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode()


def new_trace() -> bytes:
    """Return a fresh W3C `traceparent` header value."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01".encode()


def trace_of(record: Record) -> bytes | None:
    """Return the `traceparent` of a record, if it has one; what is too long to be one is not passed on."""
    trace = record.header("traceparent")
    return trace if trace is not None and len(trace) <= TRACE_BYTES else None


def _size(key: bytes | None, headers: Headers) -> int:
    size = len(key or b"")
    for name, text in headers:
        size += len(name) + len(text)
    return size


def first_failed_of(record: Record) -> int | None:
    """Return when an attempt of the work in a record failed first, if one did."""
    text = record.header(FIRST_FAILED)
    return int(text) if text is not None and text.isdigit() and len(text) < 16 else None


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
