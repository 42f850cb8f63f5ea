"""The text beside a committed offset: what above it is done, and how often each of the rest was started.

    "rm1:" + base64( varint(upper - base)  varint(offset - previous << 2 | starts) ...  crc32 )

`base` is the committed offset and `upper` the first one never handed out: what lies between them and is not listed is
done. Work in flight is what is listed, about one byte each, however wide the window (lognormal durations, 1,024 in
flight over 28,000 offsets: 1,058 bytes), so Kafka's 4,096 bytes hold far more than a worker runs at once. Where they
would not, the end of the window is left out, which is always safe: what no map calls done is done again.

Texts of another program, of a later version or damaged ones are no map: the group goes on from its offset as if there
were none. Pure; it does not know why an offset is not done.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from infra.bus import Committed
from schemas.limits import METADATA_BYTES

MARK = "rm1:"
"""Begins every text of this version."""

MAX_STARTS = 3
"""Starts are counted up to this number: two bits."""

_RAW_BYTES = (METADATA_BYTES - len(MARK)) // 4 * 3
"""What base64 makes METADATA_BYTES out of."""

_CRC_BYTES = 4


@dataclass(frozen=True)
class OffsetMap:
    """What is known about the offsets from the committed one on."""

    upper: int
    """First offset that was never handed out."""
    unfinished: Mapping[int, int]
    """Offset -> times it was started and never ended, at most MAX_STARTS; all others below `upper` are done."""


def encode(base: int, known: OffsetMap) -> Committed:
    """Return the progress to commit.

    Args:
        base: the lowest offset that is not done.
        known: no offset below base, no start count above MAX_STARTS.
    """
    if known.upper == base:
        return Committed(base)
    # The upper end is told first and known last: each try leaves out what did not fit.
    upper, entries = known.upper, sorted(known.unfinished.items())
    while True:
        head = _varint(upper - base)
        body, left_out = _entries(base, entries, _RAW_BYTES - len(head) - _CRC_BYTES)
        if left_out is None:
            break
        upper, entries = left_out, [(offset, starts) for offset, starts in entries if offset < left_out]
    raw = head + body
    return Committed(base, MARK + base64.b64encode(raw + _crc(base, raw)).decode())


def decode(committed: Committed) -> OffsetMap | None:
    """Return the map beside a committed offset, or None when the text is none of this version."""
    if not committed.metadata.startswith(MARK):
        return None
    try:
        data = base64.b64decode(committed.metadata[len(MARK) :], validate=True)
        raw, crc = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
        if crc != _crc(committed.offset, raw):
            return None
        numbers = list(_varints(raw))
    except (binascii.Error, ValueError):
        return None
    if not numbers:
        return None
    upper, unfinished, at = committed.offset + numbers[0], {}, committed.offset
    for number in numbers[1:]:
        at += number >> 2
        if at >= upper or at in unfinished:
            return None
        unfinished[at] = number & MAX_STARTS
    return OffsetMap(upper, unfinished)


def _entries(base: int, entries: list[tuple[int, int]], room: int) -> tuple[bytes, int | None]:
    """Return the bytes of the entries, and the first offset that has no room any more."""
    body, previous = bytearray(), base
    for offset, starts in entries:
        entry = _varint((offset - previous) << 2 | starts)
        if len(body) + len(entry) > room:
            return bytes(body), offset
        body += entry
        previous = offset
    return bytes(body), None


def _crc(base: int, raw: bytes) -> bytes:
    # Over the offset too: a map beside another offset than its own would call the wrong records done.
    return zlib.crc32(raw, zlib.crc32(base.to_bytes(8, "little"))).to_bytes(_CRC_BYTES, "little")


def _varint(number: int) -> bytes:
    """Return seven bits a byte, the lowest first; the high bit says that more follow (LEB128)."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varints(data: bytes) -> Iterator[int]:
    number, shift = 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            yield number
            number, shift = 0, 0
    if shift:
        raise ValueError("the last number is cut")
