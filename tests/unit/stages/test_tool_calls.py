"""Tool calls are read out of an answer's text, all of them or none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.run.tool_calls import canonical, read, write

LOOK = '<tool_call>\n{"name": "look", "arguments": {"where": "north"}}\n</tool_call>'


def test_text_and_calls_come_apart():
    """The agent carries the calls out; the text around them is said."""
    found = read(f"I look.\n{LOOK}\n{LOOK}", "call_3")

    assert ("I look.", True) == (found.content, found.readable)
    assert [("call_3_0", "look", {"where": "north"}), ("call_3_1", "look", {"where": "north"})] == [
        (call.id, call.name, json.loads(call.arguments)) for call in found.calls
    ]


def test_a_call_without_arguments_has_none():
    """Models leave them out."""
    assert ["{}"] == [call.arguments for call in read('<tool_call>{"name": "look"}</tool_call>', "c").calls]


@pytest.mark.parametrize(
    "text",
    [
        f"{LOOK}<tool_call>",
        f"{LOOK}</tool_call>",
        f"{LOOK}<tool_call>look</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "look", "arguments": "north"}</tool_call>',
        '<tool_call>["look"]</tool_call>',
        f"<tool_call>{'[' * 5000}</tool_call>",
    ],
)
def test_a_text_with_one_unreadable_call_is_text_as_a_whole(text):
    """No agent carries out half of what was meant, and it sees what the policy wrote."""
    found = read(text, "c")

    assert (text, (), False) == (found.content, found.calls, found.readable)


def test_a_text_without_calls_is_itself():
    """White space included."""
    assert (" done \n", True) == (read(" done \n", "c").content, read(" done \n", "c").readable)


JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(), st.lists, max_leaves=5)


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<")), arguments=st.dictionaries(st.text(), JSON))
def test_what_is_written_is_read_again(text, arguments):
    """Whatever the arguments hold, but for the closing mark itself."""
    call = json.dumps({"name": "look", "arguments": arguments})
    found = read(f"{text}<tool_call>{call}</tool_call>", "c")
    again = read(write(found.content, found.calls), "c")

    assert (found.content, found.calls) == (again.content.strip(), again.calls)


def test_arguments_in_another_order_are_the_same():
    """A client may have read and written them again; what is no JSON is compared as it is."""
    assert canonical('{"b": 1, "a": "x"}') == canonical('{"a":"x","b":1}')
    assert canonical("{nonsense") == "{nonsense"
