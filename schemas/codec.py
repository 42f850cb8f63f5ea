"""Message <-> bytes: the `msgpack` package packs and unpacks, msgspec validates.

Decoding never executes anything, and sizes are bounded before anything is allocated. A reader meets four kinds of bad
bytes, all a `DecodeError` that keeps the bytes: not msgpack, no envelope, a type or major version it does not know,
fields that do not fit. What is encoded can be decoded: free-form fields hold nil, bool, int, float, text, bytes, arrays
and maps, nested at most MAX_DEPTH deep, on both sides. Compression and headers are not known here: `infra/wire.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import msgpack
import msgspec

from schemas.entries import more_than
from schemas.limits import VALUE_BYTES
from schemas.message import Message

M = TypeVar("M", bound=Message)

MAX_ITEMS = 1_000_000
"""Most values in a message: scalars, arrays, maps and their keys."""

MAX_DEPTH = 64
"""Deepest nesting of arrays and maps, so that whoever walks a payload may recurse."""

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})


REASON_CHARS = 500
"""Longest reason of a DecodeError: it names what was found, which anybody may have written, and goes into logs."""


class DecodeError(ValueError):
    """Bytes are not a message that this reader knows.

    Attributes:
        data: the bytes, unchanged.
    """

    def __init__(self, reason: str, data: bytes) -> None:
        super().__init__(
            reason if len(reason) <= REASON_CHARS else f"{reason[:REASON_CHARS]}... ({len(reason)} characters)"
        )
        self.data = data


def encode(message: Message) -> bytes:
    """Return the wire bytes of a message.

    Raises:
        TypeError: a free-form field holds a value without a form on the wire.
    """
    try:
        fields = {"v": type(message).V, **msgspec.to_builtins(message, builtin_types=(bytes,))}
        check_plain(fields)
        packed: bytes = msgpack.packb(fields, use_bin_type=True)
        if more_than(MAX_ITEMS, packed):
            raise ValueError(f"more than {MAX_ITEMS} values")  # noqa: TRY301 - named like the others below
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        # Integers over 64 bits, lone surrogates, objects: each library names them by an error of its own.
        raise TypeError(f"{message.wire_type()} has no form on the wire: {error}") from error
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
        message = msgspec.convert(fields, kind)
        message.check()
        return message.as_read()
    except ValueError as error:  # msgspec's ValidationError is one
        raise DecodeError(f"{fields['type']}: {error}", data) from error


def _unpack(data: bytes) -> dict[str, Any]:
    if len(data) > VALUE_BYTES:
        raise DecodeError(f"{len(data)} bytes; at most {VALUE_BYTES} are decoded", data)
    if more_than(MAX_ITEMS, data):
        raise DecodeError(f"more than {MAX_ITEMS} values; a message holds at most so many", data)
    try:
        fields = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:  # TypeError: a map as a map's key
        raise DecodeError(f"not msgpack: {error!r}", data) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str) or "v" not in fields:
        raise DecodeError("no envelope: expected a map with `v` and `type`", data)
    try:
        check_plain(fields)
    except ValueError as error:
        raise DecodeError(f"{fields['type']}: {error}", data) from error
    return fields


def check_plain(value: Any) -> None:
    """Raise ValueError if value is nested too deep or holds a msgpack extension, which few languages read alike."""
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            members = _members(item)
            # Most arrays and maps hold nothing but scalars, and that is told without a line of Python per member.
            if not _SCALARS.issuperset(map(type, members)):
                deeper += [member for member in members if type(member) not in _SCALARS]
        if not deeper:
            return
        level = deeper
    raise ValueError(f"arrays and maps are nested over {MAX_DEPTH} deep")


def _members(value: Any) -> Collection[Any]:
    kind = type(value)
    if kind is dict and _SCALARS.issuperset(map(type, value)):
        members: Collection[Any] = value.values()
        return members
    if kind is list or kind is tuple:
        items: Collection[Any] = value
        return items
    raise ValueError(f"a {kind.__name__} is no plain value: use nil, bool, int, float, text, bytes, arrays, maps")
