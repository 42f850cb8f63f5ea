"""A request for a chat completion, read: what of it is honoured, what the task decides instead, what is refused.

    honoured     messages, tools (if the chat template shows them), stop, stream, stream_options.include_usage, and
                 max_tokens or max_completion_tokens as an upper bound
    the task's   what tokens are drawn from (temperature, top_p, seed, penalties) and by whom (model): whatever is
                 asked for is passed over, since the log-probs must be those of the distribution that is recorded
    without say  what cannot change an answer (user, metadata, store)
    refused      everything else, by name, unless it asks for what is done anyway: n = 1, tool_choice = "auto"

Contents are text, or parts that are text; `developer` is another word for `system`. Two messages are the same if they
say the same: white space around an answer, the order of a call's arguments and the names of calls say nothing, for no
template shows them. Pure; no HTTP, no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from stages.run.api_error import malformed, unsupported
from stages.run.tool_calls import ToolCall, canonical

OVERRIDDEN = frozenset(
    {
        *("model", "temperature", "top_p", "top_k", "min_p", "seed", "reasoning_effort", "verbosity"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)
"""Decided by the task, whatever a request says."""

WITHOUT_EFFECT = frozenset(
    {
        *("user", "store", "metadata", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)
"""Nothing that an answer could show."""

ONLY: Mapping[str, Any] = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "logit_bias": {},
}
"""Field -> the only value that it may have."""

HONOURED = frozenset({"messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"})
"""Read below."""

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Role in a request -> what the chat template calls it."""

MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
"""What a message may hold; anything else must be empty."""

MAX_TOOL_DEPTH = 64
"""Deepest nesting of tool schemas: theirs is some ten."""

MAX_STOPS = 4
"""Most stop texts, as the API has it."""


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a conversation, in the form in which messages are compared."""

    role: str
    """As the template calls it."""
    content: str
    """Its text; of an answer without the white space around it."""
    calls: tuple[ToolCall, ...] = ()
    """Tools that an answer calls."""
    name: str = ""
    """Who said it, if the template is to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """What a request asks for."""

    messages: tuple[Said, ...]
    """The conversation; the last message is not an answer."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tool schemas, as the request has them."""
    max_tokens: int | None = None
    """Most tokens of the answer, if it asks for fewer than the task allows."""
    stop: tuple[str, ...] = ()
    """Texts before which the answer ends."""
    stream: bool = False
    """Wants its answer as events."""
    usage: bool = False
    """Wants the count of tokens in the stream, too."""


def read_call(body: bytes) -> ChatCall:
    """Read the body of a request. Raises ApiError, which names the field."""
    request = read_object(body)
    _only_known(request)
    stream = _typed(request, "stream", bool, default=False)
    options = _typed(request, "stream_options", dict, default={})
    bounds = [_typed(request, name, int, default=None) for name in ("max_tokens", "max_completion_tokens")]
    given = [bound for bound in bounds if bound is not None]
    if any(bound < 1 for bound in given):
        raise malformed("max_tokens", "max_tokens is at least 1")
    return ChatCall(
        messages=_messages(request.get("messages")),
        tools=_tools(request.get("tools")),
        max_tokens=min(given, default=None),
        stop=_stops(request.get("stop")),
        stream=stream,
        usage=options.get("include_usage") is True,
    )


def read_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises ApiError."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed(None, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise malformed(None, "the body is not a JSON object")
    return found


def require_shallow(name: str, value: Any, most: int) -> None:
    """Raise ApiError for what is nested deeper: whoever walks it later would run out of stack."""
    if _depth(value, most + 1) > most:
        raise malformed(name, f"{name} is nested deeper than {most}")


def _depth(value: Any, most: int) -> int:
    """Return how deep a value is nested, as far as `most`."""
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not most or not isinstance(value, dict | list):
        return 0
    return 1 + max((_depth(part, most - 1) for part in inside), default=0)


def _only_known(request: Mapping[str, Any]) -> None:
    for name, value in request.items():
        if value is None or name in HONOURED or name in OVERRIDDEN or name in WITHOUT_EFFECT:
            continue
        if name not in ONLY:
            raise unsupported(name, f"{name[:80]!r} is not supported here")
        if value != ONLY[name]:
            only = msgspec.json.encode(ONLY[name]).decode()
            raise unsupported(name, f"{name} can only be {only} here: an answer is what the policy samples, as it is")


def _typed(request: Mapping[str, Any], name: str, kind: type, *, default: Any) -> Any:
    value = request.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise malformed(name, f"{name} is of type {kind.__name__}, got {str(value)[:80]!r}")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > MAX_STOPS or not all(isinstance(s, str) and s for s in found):
        raise malformed("stop", f"stop is a text that is not empty, or up to {MAX_STOPS} of them")
    return tuple(found)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise malformed("tools", "tools is a list")
    for number, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function" or not isinstance(tool.get("function"), dict):
            raise unsupported("tools", f"tools[{number}] is of type {str(kind)[:80]!r}; only functions are supported")
    require_shallow("tools", value, MAX_TOOL_DEPTH)
    return tuple(value)


def _messages(value: Any) -> tuple[Said, ...]:
    if not isinstance(value, list) or not value:
        raise malformed("messages", "messages is a list with at least one message")
    found = tuple(_message(message, f"messages[{number}]") for number, message in enumerate(value))
    if found[-1].role == "assistant":
        raise unsupported("messages", "the last message is the assistant's: nothing is to be answered")
    return found


def _message(value: Any, where: str) -> Said:
    if not isinstance(value, dict):
        raise malformed(where, f"{where} is not an object")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise unsupported(where, f"{where}.role is {str(role)[:80]!r}; known: {', '.join(ROLES)}")
    for name, field in value.items():
        if name not in MESSAGE_FIELDS and field not in (None, "", [], {}):
            raise unsupported(where, f"{where}.{name[:80]} is not supported here")
    content = _content(value.get("content"), where)
    calls = _calls(value.get("tool_calls"), where)
    if calls and role != "assistant":
        raise malformed(where, f"{where}: only an assistant calls tools")
    text = content.strip() if role == "assistant" else content
    return Said(ROLES[role], text, calls, _typed(value, "name", str, default=""))


def _content(value: Any, where: str) -> str:
    """Return the text of a message; several parts are written one below the other."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise malformed(where, f"{where}.content is a text or a list of parts")
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise unsupported(where, f"{where}.content has a part of type {str(kind)[:80]!r}; only text is supported")
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    try:
        calls = msgspec.convert(value, list[_WireCall])
    except msgspec.ValidationError as error:
        raise malformed(where, f"{where}.tool_calls: {error}") from error
    return tuple(ToolCall(call.id, call.function.name, canonical(call.function.arguments)) for call in calls)


class _WireFunction(msgspec.Struct):
    name: str
    arguments: str


class _WireCall(msgspec.Struct):
    id: str
    function: _WireFunction
