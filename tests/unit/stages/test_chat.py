"""A request is honoured, decided by the task, or refused by name; nothing is passed over in silence."""

from __future__ import annotations

import json

import pytest

from stages.run.api_error import ApiError
from stages.run.chat import HONOURED, ONLY, OVERRIDDEN, WITHOUT_EFFECT, read_call
from stages.run.tool_calls import ToolCall

USER = {"role": "user", "content": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"b": 1, "a": 2}'}}


def call_of(*messages, **fields):
    return read_call(json.dumps({"messages": list(messages or [USER]), **fields}).encode())


def refused(body):
    with pytest.raises(ApiError) as caught:
        read_call(body if isinstance(body, bytes) else json.dumps(body).encode())
    error = caught.value.body["error"]
    assert (400, "invalid_request_error") == (caught.value.status, error["type"])
    return error


def test_what_is_honoured_is_read():
    """The lower bound of two counts."""
    call = call_of(
        stop="end", stream=True, stream_options={"include_usage": True}, max_tokens=9, max_completion_tokens=7
    )

    assert (("end",), True, True, 7) == (call.stop, call.stream, call.usage, call.max_tokens)


def test_messages_are_compared_by_what_they_say():
    """White space around an answer, the order of arguments, ids and the form of a content say nothing."""
    one = call_of(
        {"role": "assistant", "content": " so \n", "tool_calls": [CALL]},
        {**USER, "content": [{"type": "text", "text": "hello"}]},
    )
    again = {**CALL, "function": {"name": "look", "arguments": '{"a":2,"b":1}'}}
    two = call_of({"role": "assistant", "content": "so", "tool_calls": [again], "refusal": None}, USER)

    assert one == two
    assert (ToolCall("any", "look", '{"a": 2, "b": 1}'),) == one.messages[0].calls


def test_a_developer_speaks_as_the_system():
    """Templates know no developer."""
    assert "system" == call_of({"role": "developer", "content": "be brief"}, USER).messages[0].role


@pytest.mark.parametrize("name", sorted(OVERRIDDEN | WITHOUT_EFFECT))
def test_what_the_task_decides_may_be_asked_for(name):
    """Agents that cannot be told otherwise send it."""
    assert call_of() == call_of(**{name: 0.3})


@pytest.mark.parametrize("name", sorted(ONLY))
def test_what_cannot_be_done_is_refused_by_name_and_what_is_done_anyway_is_not(name):
    """Null is as good as absent."""
    assert call_of() == call_of(**{name: ONLY[name]}) == call_of(**{name: None})
    assert name == refused({"messages": [USER], name: "other"})["param"]


def test_an_unknown_field_is_refused_by_name():
    """It may have meant something."""
    assert "best_of" in refused({"messages": [USER], "best_of": 3})["message"]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "function", "content": "x"}, "role is 'function'"),
        ({"content": "x"}, "role is 'None'"),
        ({**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({**USER, "content": 3}, "text or a list"),
        ({**USER, "audio": {"id": "a"}}, "audio"),
        ({**USER, "tool_calls": [CALL]}, "only an assistant"),
        ({"role": "assistant", "content": "x"}, "nothing is to be answered"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "tool_calls"),
        ({**USER, "name": 3}, "name"),
        ("hello", "not an object"),
    ],
)
def test_a_message_that_cannot_be_shown_is_refused(message, says):
    """The error names its place."""
    assert says in refused({"messages": [message]})["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"messages": []}',
        b'{"messages": {}}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        {"messages": [USER], "max_tokens": 0},
        {"messages": [USER], "max_tokens": True},
        {"messages": [USER], "max_tokens": 1.5},
        {"messages": [USER], "stop": ["a"] * 5},
        {"messages": [USER], "stop": [""]},
        {"messages": [USER], "stop": [3]},
        {"messages": [USER], "tools": {}},
        {"messages": [USER], "tools": [{"type": "web_search"}]},
        {"messages": [USER], "tools": ["look"]},
        {"messages": [USER], "stream": "yes"},
    ],
)
def test_what_is_not_a_request_is_refused(body):
    """Nothing that an agent sends breaks the stage."""
    refused(body)


def test_every_field_is_treated_in_one_way():
    """The four lists do not overlap."""
    lists = [HONOURED, OVERRIDDEN, WITHOUT_EFFECT, frozenset(ONLY)]

    assert sum(map(len, lists)) == len(frozenset.union(*lists))


def test_tool_schemas_that_are_nested_without_end_are_refused():
    """Whoever walks them would run out of stack, and the episode would pay for it."""
    deep = '{"a":' * 200 + "1" + "}" * 200
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
    with pytest.raises(ApiError) as caught:
        read_call(f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}'.encode())
    assert (400, "tools is nested deeper than 64") == (caught.value.status, str(caught.value))
