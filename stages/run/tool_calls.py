"""Tool calls in the text of an answer, in the form that Hermes and Qwen models write them.

    <tool_call>
    {"name": "look", "arguments": {"where": "north"}}
    </tool_call>

A text is either read as a whole or not at all: with one call that cannot be read all of it is said to the user, so that
no agent carries out half of what was meant. What was sampled is never changed by this. Pure.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_CALL = re.compile(rf"{OPEN}(.*?){CLOSE}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    id: str = field(compare=False)
    """Names the call, and the tool's result names it again; no template shows it, so it makes no other call of it."""
    name: str
    """The tool."""
    arguments: str
    """Its arguments, as JSON."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer says and calls."""

    content: str
    """The text around the calls."""
    calls: tuple[ToolCall, ...]
    """The calls, in order."""
    readable: bool = True
    """False if it holds what was meant as a call and is none."""


def read(text: str, prefix: str) -> Reading:
    """Return what an answer calls; the calls are named `prefix` and their number."""
    found = [_call(body, f"{prefix}_{number}") for number, body in enumerate(_CALL.findall(text))]
    content = _CALL.sub("", text)
    calls = tuple(call for call in found if call is not None)
    if len(calls) < len(found) or OPEN in content or CLOSE in content:
        return Reading(content=text, calls=(), readable=False)
    return Reading(content=content.strip() if calls else text, calls=calls)


def write(content: str, calls: tuple[ToolCall, ...]) -> str:
    """Return an answer as a policy would have written it: for calls that another model made."""
    blocks = [f'{OPEN}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n{CLOSE}' for call in calls]
    return "\n".join([content, *blocks] if content else blocks)


def canonical(arguments: str) -> str:
    """Return arguments in one form, whatever spaces and order they came in; a text that is not JSON as it is."""
    try:
        return json.dumps(msgspec.json.decode(arguments), sort_keys=True, ensure_ascii=False)
    except (msgspec.DecodeError, RecursionError):
        return arguments


def _call(body: str, name: str) -> ToolCall | None:
    """Return the call that a block holds; None if it holds none."""
    try:
        call = msgspec.json.decode(body.strip(), type=_Written)
        return ToolCall(name, call.name, json.dumps(call.arguments, sort_keys=True, ensure_ascii=False))
    except (msgspec.DecodeError, RecursionError):
        return None


class _Written(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}
