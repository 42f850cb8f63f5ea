"""Answers in the shape of OpenAI's chat completions: one object, or the same as a stream of events.

An answer is generated first and streamed then: what it calls can be told only once all of it is there, and until then
a call may have to be refused. So a stream has a piece for the role, one for the text, one for each call of a tool, and
the reason why it ended. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from stages.run.branches import Answer

DONE = b"data: [DONE]\n\n"
"""Ends a stream."""


def completion(answer: Answer, *, model: str, now_s: int) -> dict[str, Any]:
    """Return an answer as one object."""
    choice = {"index": 0, "message": message(answer), "finish_reason": finish_reason(answer), "logprobs": None}
    return {**_head(answer, "chat.completion", model, now_s), "choices": [choice], "usage": usage(answer)}


def events(answer: Answer, *, model: str, now_s: int, with_usage: bool) -> Iterator[bytes]:
    """Return an answer as server-sent events, the last of which says that there are no more."""
    head = _head(answer, "chat.completion.chunk", model, now_s)
    for delta in _deltas(answer):
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason(answer)}]})
    if with_usage:
        yield _event({**head, "choices": [], "usage": usage(answer)})
    yield DONE


def message(answer: Answer) -> dict[str, Any]:
    """Return the assistant's message, which the agent's next request holds again."""
    said = answer.said
    calls = {"tool_calls": _calls(answer)} if said.calls else {}
    return {"role": "assistant", "content": said.content or (None if said.calls else ""), **calls}


def finish_reason(answer: Answer) -> str:
    """Return why an answer ended, in the API's words."""
    if answer.cut:
        return "length"
    return "tool_calls" if answer.said.calls else "stop"


def usage(answer: Answer) -> dict[str, int]:
    """Return the count of tokens."""
    prompt, sampled = answer.prompt_tokens, answer.sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(answer: Answer, kind: str, model: str, now_s: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": now_s, "model": model}


def _deltas(answer: Answer) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if answer.said.content:
        yield {"content": answer.said.content}
    for index, call in enumerate(_calls(answer)):
        yield {"tool_calls": [{"index": index, **call}]}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.said.calls
    ]


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
