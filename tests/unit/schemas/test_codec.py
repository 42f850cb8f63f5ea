"""Messages to bytes and back, and everything that may lie on a topic instead."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import codec
from schemas.codec import DecodeError, decode, encode
from schemas.messages import Episode, Task
from tests.golden.samples import SAMPLES
from tests.strategies import FREE_FORM, MESSAGE_TYPES, messages, structs

TASK = SAMPLES["rollmill.task"]
FIELDS = msgpack.unpackb(encode(TASK))


def refused(data: bytes, *kinds: type[Any]) -> str:
    """Return why bytes are refused, having checked that the error keeps them."""
    with pytest.raises(DecodeError) as caught:
        decode(data, *(kinds or MESSAGE_TYPES))
    assert caught.value.data is data
    return str(caught.value)


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.wire_type())
@settings(max_examples=40)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind, data):
    """Encoding and decoding gives an equal message of the same type, as every reader takes it."""
    message = data.draw(structs(kind))
    again = decode(encode(message), *MESSAGE_TYPES)
    assert type(again) is kind
    assert again == message.as_read()
    assert again == again.as_read()


@given(message=messages(), extra=st.dictionaries(st.text().filter(lambda name: name.startswith("x-")), FREE_FORM))
def test_unknown_fields_are_ignored(message, extra):
    """A newer writer may add fields: an older reader sees the message without them."""
    fields = {**msgpack.unpackb(encode(message)), **extra}
    assert decode(msgpack.packb(fields), type(message)) == message.as_read()


def test_a_field_with_a_default_may_be_absent():
    """An older writer does not know newer fields: they take their defaults."""
    fields = {name: value for name, value in FIELDS.items() if name != "horizon"}
    assert decode(msgpack.packb(fields), Task).horizon == 16


def test_an_unknown_type_names_what_was_expected():
    """The error says which types belong on the topic, and which one was found."""
    reason = refused(msgpack.packb({"v": 1, "type": "somebody.else"}), Task, Episode)
    assert reason == "expected rollmill.task or rollmill.episode, found 'somebody.else'"


def test_a_type_of_another_topic_is_refused():
    """A known message on the wrong topic is as unreadable as an unknown one."""
    assert "expected rollmill.episode, found 'rollmill.task'" in refused(encode(TASK), Episode)


def test_an_unknown_major_version_is_refused():
    """A reader does not guess at a version that it was not written for."""
    reason = refused(msgpack.packb({**FIELDS, "v": 2}))
    assert reason == "rollmill.task has major version 2; this reader knows 1"


def test_a_missing_field_is_named():
    """Somebody who writes a producer learns which field is missing."""
    assert "run" in refused(msgpack.packb({name: value for name, value in FIELDS.items() if name != "run"}))


def test_a_field_of_the_wrong_type_is_named():
    """Nothing is converted between text and numbers."""
    assert "$.sample" in refused(msgpack.packb({**FIELDS, "sample": "0"}))


@pytest.mark.parametrize("value", [None, 1, "text", [], [1, 2], {}, {"v": 1}, {"type": "rollmill.task"}, {"type": 1}])
def test_msgpack_without_an_envelope_is_refused(value):
    """A map with `v` and `type` is the least a message has."""
    assert "no envelope" in refused(msgpack.packb(value))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x81", b"\xd9\x01\xff", b"{}", b"\x81\x90\x01", encode(TASK)[:-1], encode(TASK) + b"\x00"],
    ids=["empty", "reserved", "cut map", "bad utf-8", "json", "array as key", "cut message", "trailing byte"],
)
def test_what_is_not_msgpack_is_refused(data):
    """Broken bytes are an error with the bytes, whatever breaks them."""
    assert "not msgpack" in refused(data)


def test_a_huge_value_is_refused_unread():
    """Nothing is unpacked beyond the limit."""
    assert "at most" in refused(bytes(codec.VALUE_BYTES + 1))


def test_a_claimed_size_is_not_believed():
    """An array that says it has four billion entries allocates none of them."""
    assert "not msgpack" in refused(b"\xdd\xff\xff\xff\xff")


@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1x"], ids=["arrays", "maps"])
@pytest.mark.parametrize("depth", [codec.MAX_DEPTH, 900, 5_000, 1_000_000])
def test_deep_nesting_is_refused(head, depth):
    """A payload that would exhaust the stack of whoever walks it never gets that far."""
    marker = "the deep place"
    data = msgpack.packb({**FIELDS, "payload": {"deep": marker}})
    assert refused(data.replace(msgpack.packb(marker), head * depth + b"\xc0"), Task)


def test_nesting_up_to_the_limit_is_carried():
    """The limit counts the message's own map and its payload."""
    deep: Any = None
    for _ in range(codec.MAX_DEPTH - 2):
        deep = [deep]
    task = msgspec.structs.replace(TASK, payload={"deep": deep})
    assert decode(encode(task), Task) == task
    with pytest.raises(TypeError, match="nested over 64 deep"):
        encode(msgspec.structs.replace(TASK, payload={"deep": [deep]}))


@pytest.mark.parametrize("value", [msgpack.Timestamp(1, 2), msgpack.ExtType(4, b"x")], ids=["timestamp", "extension"])
@pytest.mark.parametrize("where", [lambda value: value, lambda value: [value], lambda value: {"a": value}])
def test_msgpack_extensions_are_refused(value, where):
    """What a stage could not write again it does not take in."""
    assert "is no plain value" in refused(msgpack.packb({**FIELDS, "payload": {"when": where(value)}}), Task)


@given(data=st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_decode_error(data):
    """No other exception leaves the decoder, whatever it is fed."""
    _survives(data)


@given(message=messages(), data=st.data())
def test_damaged_messages_are_a_message_or_a_decode_error(message, data):
    """Bytes changed, cut out or put into a real message break nothing but that message."""
    whole = encode(message)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, min(len(whole), start + 4)))
    _survives(whole[:start] + data.draw(st.binary(max_size=4)) + whole[stop:])


@given(fields=st.dictionaries(st.text(max_size=8), FREE_FORM), kind=st.sampled_from(MESSAGE_TYPES))
def test_random_fields_are_a_message_or_a_decode_error(fields, kind):
    """An envelope around anything is checked field by field."""
    _survives(msgpack.packb({**fields, "v": 1, "type": kind.wire_type()}))


def _survives(data: bytes) -> None:
    try:
        message = decode(data, *MESSAGE_TYPES)
    except DecodeError as error:
        kept = error.data
        assert kept is data
    else:
        encode(message)


@pytest.mark.parametrize(
    "value",
    [2**70, "\ud800", object(), {(1, 2): 3}, msgpack.Timestamp(1, 2)],
    ids=["70 bits", "lone surrogate", "object", "tuple as key", "timestamp"],
)
def test_what_has_no_form_on_the_wire_is_a_type_error(value):
    """Whoever builds such a message learns which one it was, before anything is sent."""
    with pytest.raises(TypeError, match=r"rollmill\.task has no form on the wire"):
        encode(msgspec.structs.replace(TASK, payload={"value": value}))


def test_no_python_name_is_on_the_wire():
    """Packages may be renamed without touching data."""
    for message in SAMPLES.values():
        data = encode(message)
        assert type(message).__name__.encode() not in data
        assert type(message).__module__.encode() not in data
