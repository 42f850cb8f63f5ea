"""Which fields of a message hold values of anybody's making: found once for each type, from its annotations.

All other fields are checked by their types when a message is decoded, so these are the only ones in which something
may lie that has no plain form, or that is nested without end. What they may hold is not known here.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

Places = dict[str, Any]
"""Field -> such places inside it; Any where it is one itself."""


@functools.cache
def places(kind: type[msgspec.Struct]) -> Places:
    """Return where a type of messages, or of their parts, holds such values."""
    hints = typing.get_type_hints(kind)
    found = {name: _inside(hints[name]) for name in kind.__struct_fields__}
    return {name: inside for name, inside in found.items() if inside}


def _inside(hint: Any) -> Any:
    if hint is Any:
        return Any
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return places(hint)
    within = [inside for member in typing.get_args(hint) if (inside := _inside(member))]
    if Any in within or (within and typing.get_origin(hint) is dict):
        return Any
    return {name: inside for one in within for name, inside in one.items()}


def values(part: msgspec.Struct, where: Places, depth: int = 1) -> Iterator[tuple[Any, int]]:
    """Give each value at these places of a message, and how many maps and arrays it lies in."""
    for name, inside in where.items():
        found = getattr(part, name)
        if found is None:
            continue
        if inside is Any:
            yield found, depth
        elif isinstance(found, msgspec.Struct):
            yield from values(found, inside, depth + 1)
        else:
            for one in found:
                yield from values(one, inside, depth + 2)
