"""How many values lie in msgpack bytes, told from their headers before anything is made of them.

An empty array is one byte on the wire and sixty in memory: a kilobyte of zstd may unfold into a gigabyte of nothing. No
value is built here, and bytes that are not msgpack are the unpacker's business.
"""

from __future__ import annotations

_HEADER_BYTES = bytes(
    # 0x00-0xbf: small numbers, maps, arrays, texts; 0xe0-0xff: small negative numbers.
    [1] * 0xC0
    # nil, reserved, false, true; bin 8 16 32; ext 8 16 32; float 32 64; uint 8 16 32 64; int 8 16 32 64
    + [1, 1, 1, 1, 2, 3, 5, 3, 4, 6, 5, 9, 2, 3, 5, 9, 2, 3, 5, 9]
    # fixext 1 2 4 8 16; str 8 16 32; array 16 32; map 16 32
    + [3, 4, 6, 10, 18, 2, 3, 5, 3, 5, 3, 5]
    + [1] * 0x20
)
"""First byte of a value -> bytes of it that have a fixed length."""

_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""First byte of a bin, ext or str -> bytes that hold the length of its content."""


def more_than(limit: int, data: bytes) -> bool:
    """Tell whether data holds over `limit` values: scalars, arrays, maps and their keys each count one."""
    # Each is a byte at least. So messages of the usual size cost nothing here.
    if len(data) <= limit:
        return False
    at = count = 0
    end = len(data)
    while at < end:
        count += 1
        if count > limit:
            return True
        first = data[at]
        size = _HEADER_BYTES[first]
        if 0xA0 <= first <= 0xBF:
            size += first & 0x1F
        elif first in _LENGTH_BYTES:
            size += int.from_bytes(data[at + 1 : at + 1 + _LENGTH_BYTES[first]], "big")
        at += size
    return False
