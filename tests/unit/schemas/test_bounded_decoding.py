"""Whoever may write to a topic may write anything: what no bytes can do to a reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgpack
import msgspec
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infra.bus import Record
from infra.wire import unpack
from schemas import codec
from schemas.codec import DecodeError, decode, encode
from schemas.entries import more_than
from schemas.messages import Task
from schemas.topics import TABLE, TASKS
from tests.golden.samples import SAMPLES
from tests.strategies import FREE_FORM, MESSAGE_TYPES, messages

ROOT = Path(__file__).parents[3]
FIELDS = msgpack.unpackb(encode(SAMPLES["rollmill.task"]))
PLACE = msgpack.packb("the deep place")

_HEADS = st.integers(0, 255).map(lambda first: bytes([first]))
_LENGTHS = st.sampled_from(
    [b"\x00", b"\x01", b"\x7f", b"\xff", b"\x00\x00", b"\xff\xff", b"\xff\xff\xff\xff", b"\x80" * 8]
)
VALUES: st.SearchStrategy[bytes] = st.one_of(
    FREE_FORM.map(msgpack.packb),
    st.builds(lambda head, length, rest: head + length + rest, _HEADS, _LENGTHS, st.binary(max_size=6)),
    st.builds(
        lambda code, data: msgpack.packb(msgpack.ExtType(code, data)), st.integers(0, 127), st.binary(max_size=9)
    ),
    st.sampled_from([b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xcb\xff\xf0\0\0\0\0\0\0", b"\xcf" + b"\xff" * 8, b"\xc1"]),
    st.builds(lambda text: bytes([0xA0 + len(text)]) + text, st.binary(max_size=31)),
)
"""One value of msgpack, or what looks like one: every first byte, lengths that lie, extensions, texts that are none."""


@st.composite
def envelopes(draw: st.DrawFn) -> bytes:
    """An envelope of a real type around raw values, keys of any kind, fields twice, lengths that may be wrong."""
    kind = draw(st.sampled_from(MESSAGE_TYPES))
    names = draw(st.lists(st.sampled_from((*kind.__struct_fields__, "x")), max_size=12))
    pairs = [(msgpack.packb("v"), msgpack.packb(kind.V)), (msgpack.packb("type"), msgpack.packb(kind.wire_type()))]
    pairs += [(msgpack.packb(name), draw(VALUES)) for name in names]
    pairs += draw(st.lists(st.tuples(VALUES, VALUES), max_size=2))
    pairs = draw(st.permutations(pairs))
    count = draw(st.sampled_from([len(pairs), len(pairs), len(pairs) + 1, 0xFFFF]))
    return b"\xde" + count.to_bytes(2, "big") + b"".join(key + value for key, value in pairs)


@settings(max_examples=300)
@given(data=st.one_of(envelopes(), VALUES))
@example(data=b"\xde\x00\x02\xa1v\xca\x7f\xc0\x00\x00\xa4type\xa0")
def test_no_bytes_raise_anything_but_a_decode_error(data):
    """A stage sends such a record to `dead` and goes on; any other error would stop it."""
    try:
        decode(data, *MESSAGE_TYPES)
    except DecodeError as error:
        kept = error.data
        assert kept is data


@settings(max_examples=150)
@given(
    value=st.one_of(envelopes(), envelopes().map(zstandard.compress), st.binary(max_size=40), st.none()),
    headers=st.lists(
        st.tuples(
            st.sampled_from(["content-encoding", "content-type", "traceparent", "attempt", "x"]),
            st.sampled_from([b"zstd", b"gzip", b"\xff", b"", b"application/json"]),
        ),
        max_size=3,
    ),
    topic=st.sampled_from(TABLE),
)
async def test_no_record_raises_anything_but_a_decode_error(value, headers, topic):
    """With any headers: they come from whoever wrote the record, too."""
    record = Record(topic.name, 0, 0, 0, None, value, tuple(headers))
    try:
        found = (await unpack(topic, record)).message
    except DecodeError as error:
        found = error

    assert isinstance(found, (DecodeError, *topic.carries))


def with_payload(raw: bytes) -> bytes:
    """Return a task's bytes with raw bytes as a value of its payload."""
    return msgpack.packb({**FIELDS, "payload": {"deep": "the deep place"}}).replace(PLACE, raw)


@pytest.mark.parametrize(("inner", "name"), [(b"\x90", "arrays"), (b"\x80", "maps"), (b"\xc0", "nils")], ids=str)
def test_a_kilobyte_that_unfolds_into_millions_of_values_is_refused_before_it_does(inner, name):
    """Each of them is a byte in the record and sixty in memory."""
    many = b"\xdd\x00\x0f\x42\x40" + inner * 1_000_000
    data = with_payload(b"\x9f" + many * 15)
    assert len(zstandard.compress(data)) < 4_000, name
    with pytest.raises(DecodeError, match="more than 1000000 values"):
        decode(data, Task)


def test_large_messages_of_few_values_are_read():
    """Token ids and log-probs are a few long byte strings, not lists of numbers."""
    data = with_payload(msgpack.packb(bytes(8_000_000)))
    assert len(decode(data, Task).payload["deep"]) == 8_000_000


def test_what_could_not_be_read_is_not_written():
    """A verdict that is a list of a million numbers is refused where it is made."""
    task = msgspec.structs.replace(SAMPLES["rollmill.task"], payload={"many": [0] * 1_000_000})
    with pytest.raises(TypeError, match="no form on the wire: more than 1000000 values"):
        encode(task)


@given(message=messages(), limit=st.integers(0, 60))
def test_values_are_counted_as_they_are(message, limit):
    """Over whole messages of every type, compared with what the unpacker makes of them."""
    data = encode(message)
    count = _count(msgpack.unpackb(data, strict_map_key=False))
    # Below `limit` bytes nothing is counted, since each value is one at least.
    assert more_than(limit, data) is (count > limit)


def _count(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(_count(key) + _count(item) for key, item in value.items())
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


@given(data=st.binary(max_size=300), limit=st.integers(0, 300))
def test_bytes_that_are_not_msgpack_are_counted_without_an_error(data, limit):
    """Whatever lengths they claim."""
    assert more_than(limit, data) in (True, False)


WATCHED = """
import sys
from schemas.codec import DecodeError, decode
from tests.strategies import MESSAGE_TYPES
from tests.golden.samples import SAMPLES
from schemas.codec import encode

FORBIDDEN = ("import", "exec", "compile", "marshal.", "pickle.", "os.", "subprocess.", "socket.", "open", "ctypes.")
whole = [encode(message) for message in SAMPLES.values()]
evil = [
    b"\\x80\\x04\\x95\\x1b\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x8c\\x05posix\\x94\\x8c\\x06system\\x94\\x93\\x94\\x8c\\x02id\\x94\\x85\\x94R\\x94.",
    whole[0].replace(b"rollmill.task", b"os.system.now"),
    *(data.replace(b"keydoor", b"__imp__") for data in whole),
]

def read():
    for data in (*whole, *evil):
        try:
            decode(data, *MESSAGE_TYPES)
        except DecodeError:
            pass

read()  # once before: whatever is set up lazily is no business of the data
seen, watching = [], True
sys.addaudithook(lambda event, arguments: seen.append(event) if watching and event.startswith(FORBIDDEN) else None)
read()
watching = False
print(len(whole), seen)
"""


def test_decoding_executes_imports_and_opens_nothing():
    """As the interpreter itself tells: no audit event of that kind, for every message and for a pickle."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == f"{len(SAMPLES)} []\n"


async def test_a_compressed_bomb_of_values_is_refused():
    """As it would come in a record."""
    data = with_payload(b"\x92" + (b"\xdd\x00\x0f\x42\x40" + b"\x90" * 1_000_000) * 2)
    record = Record("tasks", 0, 0, 0, None, zstandard.compress(data), (("content-encoding", b"zstd"),))
    with pytest.raises(DecodeError, match=r"more than \d+ values"):
        await unpack(TASKS, record)
    assert codec.MAX_ITEMS == 1_000_000
