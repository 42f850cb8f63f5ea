"""The base of everything that travels on a topic.

A message is a frozen, keyword-only msgspec Struct. Its wire form is one msgpack map: `v` (the major version of its
type), `type` (the tag given at the class) and its fields. Fields may be added with a default within a major version;
a reader ignores fields it does not know; a change that an old reader would misread is a new `type`. No Python import
path is ever on the wire. The bytes themselves are made in `codec.py`; which topic carries what is `topics.py`.
"""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Something one service says to another through the log."""

    V: ClassVar[int] = 1
    """Major version of this type on the wire."""

    def check(self) -> None:
        """Raise ValueError when a field holds what no such message can mean; decoding calls it."""

    def as_read(self) -> Self:
        """Return what a reader takes the message for; decoding calls it, so all readers agree.

        That is the message itself, unless it can be read and cannot count as what it says.
        """
        return self

    @classmethod
    def wire_type(cls) -> str:
        """Return the tag that names this message on the wire."""
        tag = cls.__struct_config__.tag
        if not isinstance(tag, str):
            raise TypeError(f"{cls.__name__} has no wire tag: give its class a `tag=`")
        return tag


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A value inside a message; it has no envelope of its own."""
