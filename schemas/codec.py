"""Message <-> bytes: the `msgpack` package packs and unpacks, msgspec validates.

Nearly all messages hold nothing but what has a plain form, and such bytes as we write. For those msgspec does it in one
go, without a map in between, and with the same result: what it takes in that way is what the long way takes, and
whatever it does not take goes the long way, which says what is wrong.

Decoding never executes anything, and sizes are bounded before anything is allocated. A reader meets four kinds of bad
bytes, all a `DecodeError` that keeps the bytes: not msgpack, no envelope, a type or major version it does not know,
fields that do not fit. What is encoded can be decoded: free-form fields hold nil, bool, int, float, text, bytes, arrays
and maps, nested at most MAX_DEPTH deep, on both sides. Compression and headers are not known here: `infra/wire.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgpack
import msgspec

from schemas.entries import more_than
from schemas.free_form import places, values
from schemas.limits import VALUE_BYTES
from schemas.message import Message

M = TypeVar("M", bound=Message)

MAX_ITEMS = 1_000_000
"""Most values in a message: scalars, arrays, maps and their keys."""

MAX_DEPTH = 64
"""Deepest nesting of arrays and maps, so that whoever walks a payload may recurse."""

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})


AT_ONCE_BYTES = MAX_ITEMS
"""Larger messages go the long way: those of so many bytes cannot hold more than MAX_ITEMS values."""

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
    quick = _encoded_at_once(message)
    return _encoded_by_fields(message) if quick is None else quick


def _encoded_by_fields(message: Message) -> bytes:
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
    message = _decoded_at_once(data, types)
    if message is None:
        message = _decoded_by_fields(data, types)
    try:
        message.check()
        return message.as_read()
    except ValueError as error:
        raise DecodeError(f"{message.wire_type()}: {error}", data) from error


def _decoded_by_fields(data: bytes, types: tuple[type[M], ...]) -> M:
    fields = _unpack(data)
    wanted = {kind.wire_type(): kind for kind in types}
    kind = wanted.get(fields["type"])
    if kind is None:
        raise DecodeError(f"expected {' or '.join(wanted)}, found {fields['type']!r}", data)
    if fields["v"] != kind.V:
        raise DecodeError(f"{fields['type']} has major version {fields['v']!r}; this reader knows {kind.V}", data)
    try:
        message = msgspec.convert(fields, kind)
        _check_free_form(message)
    except ValueError as error:  # msgspec's ValidationError is one
        raise DecodeError(f"{fields['type']}: {error}", data) from error
    return message


def _check_free_form(message: Message) -> None:
    for value, depth in values(message, places(type(message))):
        check_plain([value], depth - 1)


class _Envelope(msgspec.Struct):
    v: int
    type: str


_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_ENCODER = msgspec.msgpack.Encoder()


@functools.cache
def _decoder(kind: type[M]) -> msgspec.msgpack.Decoder[M]:
    return msgspec.msgpack.Decoder(kind)


def _decoded_at_once(data: bytes, types: tuple[type[M], ...]) -> M | None:
    if len(data) > AT_ONCE_BYTES:
        return None
    try:
        envelope = _ENVELOPE.decode(data)
        kind = next((kind for kind in types if (kind.wire_type(), kind.V) == (envelope.type, envelope.v)), None)
        if kind is None:
            return None
        message: M = _decoder(kind).decode(data)
        _check_free_form(message)
    except (ValueError, RecursionError):
        return None
    return message


@functools.cache
def _wire_form(kind: type[Message]) -> Callable[..., msgspec.Struct]:
    """Return what a type of message looks like on the wire: `v`, `type`, and its fields."""
    return msgspec.defstruct(kind.__name__, [("v", int), ("type", str), *kind.__struct_fields__])


def _encoded_at_once(message: Message) -> bytes | None:
    kind = type(message)
    try:
        _check_free_form(message)
        packed = _ENCODER.encode(_wire_form(kind)(kind.V, kind.wire_type(), *msgspec.structs.astuple(message)))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return packed if len(packed) <= AT_ONCE_BYTES else None


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
    return fields


def check_plain(value: Any, depth: int = 0) -> None:
    """Raise ValueError if value is nested too deep or holds a msgpack extension, which few languages read alike.

    Args:
        value: an array or a map.
        depth: how many arrays and maps it lies in itself.
    """
    level = [value]
    for _ in range(MAX_DEPTH - depth):
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
