"""Message <-> bytes: the `msgpack` package packs and unpacks, msgspec validates.

Decoding never executes anything, and sizes are bounded before anything is allocated. A reader meets four kinds of bad
bytes, all a `DecodeError` that keeps the bytes: not msgpack, no envelope, a type or major version it does not know,
fields that do not fit. Compression and headers are not known here: `infra/wire.py`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgpack
import msgspec

from schemas.message import Message

M = TypeVar("M", bound=Message)

MAX_VALUE_BYTES = 16 * 1024 * 1024
"""Largest uncompressed message that is decoded."""

MAX_ITEMS = 1_000_000
"""Most entries of one array or map in a message."""


class DecodeError(ValueError):
    """Bytes are not a message that this reader knows.

    Attributes:
        data: the bytes, unchanged.
    """

    def __init__(self, reason: str, data: bytes) -> None:
        super().__init__(reason)
        self.data = data


def encode(message: Message) -> bytes:
    """Return the wire bytes of a message.

    Raises:
        TypeError: a free-form field holds a value without a msgpack form.
    """
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    packed: bytes = msgpack.packb({"v": type(message).V, **fields}, use_bin_type=True)
    return packed


def decode(data: bytes, *types: type[M]) -> M:
    """Return the message in data, which must be one of the given types.

    Raises:
        DecodeError: the bytes are not such a message.
    """
    fields = _unpack(data)
    wanted = {kind.wire_type(): kind for kind in types}
    kind = wanted.get(fields["type"])
    if kind is None:
        raise DecodeError(f"expected {' or '.join(wanted)}, found {fields['type']!r}", data)
    if fields["v"] != kind.V:
        raise DecodeError(f"{fields['type']} has major version {fields['v']!r}; this reader knows {kind.V}", data)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise DecodeError(f"{fields['type']}: {error}", data) from error


def _unpack(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_VALUE_BYTES:
        raise DecodeError(f"{len(data)} bytes; at most {MAX_VALUE_BYTES} are decoded", data)
    try:
        fields = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
        )
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"not msgpack: {error!r}", data) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str) or "v" not in fields:
        raise DecodeError("no envelope: expected a map with `v` and `type`", data)
    return fields
