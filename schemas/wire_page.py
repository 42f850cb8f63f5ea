"""Every topic and every message as Markdown, rendered from the table and the Structs: the reference of the wire page.

Types are named as msgpack names them, so that the page is readable without Python. The sentence of a field is the
string under it in its class; a field without one is an error, since nobody could know what it means. This file does
not know the prose around its tables (`docs/wire.md`) and writes no file.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from schemas.claim import ClaimCheck
from schemas.diagram import table
from schemas.message import Message
from schemas.topics import TABLE

Struct: TypeAlias = type[msgspec.Struct]

_PLAIN: dict[Any, str] = {
    Any: "any",
    bool: "bool",
    int: "int",
    float: "float",
    str: "text",
    bytes: "bin",
    types.NoneType: "nil",
}


def wire_page() -> str:
    """Return the topics, the messages, the values inside them and the enumerations."""
    messages = list(dict.fromkeys(kind for topic in TABLE for kind in topic.carries))
    messages.append(ClaimCheck)  # no topic carries it: it stands for what one carries
    inside = [kind for kind in _reachable(messages) if kind not in messages]
    parts: list[Struct] = [kind for kind in inside if not issubclass(kind, StrEnum)]
    enums = [kind for kind in inside if issubclass(kind, StrEnum)]
    blocks = ["### Topics", table(tags=True), "### Messages", *map(struct_section, messages)]
    blocks += ["### Values inside messages", *map(struct_section, parts)]
    blocks += ["### Enumerations", *map(enum_section, enums)]
    return "\n".join(block if block.endswith("\n") else block + "\n" for block in blocks)


def struct_section(kind: Struct) -> str:
    """Return the heading, the sentence and the fields of a message or of a value inside one."""
    hints, sentences = typing.get_type_hints(kind), attribute_docstrings(kind)
    rows = [f"| `{name}` | {_type(hints[name])} | {default} | {sentences[name]} |" for name, default in _defaults(kind)]
    lines = [f"#### {title(kind)}", "", _first_paragraph(kind), ""]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|", *_envelope(kind), *rows]
    return "\n".join(lines) + "\n"


def enum_section(kind: type[StrEnum]) -> str:
    """Return the heading, the sentence and the members of an enumeration."""
    sentences = attribute_docstrings(kind)
    rows = [f"| `{member.value}` | {sentences[member.name]} |" for member in kind]
    lines = [f"#### {title(kind)}", "", _first_paragraph(kind), "", "| value | meaning |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def title(kind: type[Any]) -> str:
    """Return the name of a type on the page: its tag for a message, else its class's name."""
    return kind.wire_type() if issubclass(kind, Message) else kind.__name__


def attribute_docstrings(kind: type[Any]) -> dict[str, str]:
    """Return attribute -> the string literal under it, in one line.

    Raises:
        TypeError: an attribute has none.
    """
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, after in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        name = _assigned(statement)
        if name is None:
            continue
        match after:
            case ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split()).replace("|", r"\|")
            case _:
                raise TypeError(f"{kind.__name__}.{name} has no sentence: write a docstring under it")
    return found


def _assigned(statement: ast.stmt) -> str | None:
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case _:
            return None


def _envelope(kind: Struct) -> Iterator[str]:
    """Yield the rows of what the codec and msgspec add to the fields."""
    config = kind.__struct_config__
    if issubclass(kind, Message):
        yield f"| `v` | int | required | Major version: {kind.V}. |"
    if config.tag is not None:
        yield f'| `{config.tag_field}` | text | required | Always `"{config.tag}"`. |'


def _defaults(kind: Struct) -> Iterator[tuple[str, str]]:
    for field in msgspec.structs.fields(kind):
        if field.default is not msgspec.NODEFAULT:
            yield field.encode_name, _literal(field.default)
        elif field.default_factory is not msgspec.NODEFAULT:
            yield field.encode_name, _literal(field.default_factory())
        else:
            yield field.encode_name, "required"


def _literal(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        return "its defaults"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    if value is None:
        return "nil"
    return f"`{str(value).lower()}`"


def _type(hint: Any) -> str:
    """Return an annotation as msgpack and this page name it."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type, arguments))
    if origin is tuple:
        return f"array of {_type(arguments[0])}"
    if origin is dict:
        return f"map of {_type(arguments[0])} to {_type(arguments[1])}"
    name = title(hint)
    return f"[{name}](#{name.lower().replace('.', '')})"


def _reachable(kinds: list[Any]) -> list[type[Any]]:
    """Return these Structs and every Struct and enumeration in their fields, in order of appearance."""
    found: dict[type[Any], None] = {}
    waiting = list(kinds)
    while waiting:
        hint = waiting.pop(0)
        if typing.get_origin(hint) is not None:
            waiting[:0] = typing.get_args(hint)
        elif isinstance(hint, type) and issubclass(hint, msgspec.Struct | StrEnum) and hint not in found:
            found[hint] = None
            if issubclass(hint, msgspec.Struct):
                hints = typing.get_type_hints(hint)
                waiting += [hints[name] for name in hint.__struct_fields__]
    return list(found)


def _first_paragraph(kind: type[Any]) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
