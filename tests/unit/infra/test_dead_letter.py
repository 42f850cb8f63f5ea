"""What is given up is kept as it was, and read however it was written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.bus import Record
from infra.clock import VirtualClock
from infra.dead_letter import DeadLetter, Death, bury
from infra.memory import MemoryBus
from schemas import codec
from schemas.codec import DecodeError
from schemas.limits import RECORD_BYTES
from schemas.topics import DEAD, TABLE
from tests.logs import make_task, read_all

POISON = Death(stage="init", cause="not msgpack")
EXHAUSTED = Death(stage="run", cause="policy: gone", kind="engine", attempts=3, first_failed_ms=4)
RECORD = Record("tasks", 3, 5, 7, b"k", b"\xc1", (("mine", b"1"), ("ce_subject", b"r/g/2")))


async def buried(record, death=POISON):
    bus = MemoryBus(VirtualClock(now_ms=9))
    await bus.create_topics(TABLE)
    await bury(bus, bus.clock, record, death)
    (found,) = await read_all(bus, DEAD)
    return found


async def test_bytes_key_and_headers_are_kept_with_where_they_came_from():
    """In the partition they came from."""
    found = await buried(Record("tasks", 3, 5, 7, b"k", b"\xc1", (("mine", b"1"),)))

    assert (b"\xc1", b"k", 3) == (found.value, found.key, found.partition)
    assert {
        "mine": b"1",
        "x-orig-topic": b"tasks",
        "x-orig-partition": b"3",
        "x-orig-offset": b"5",
        "x-orig-timestamp-ms": b"7",
        "x-stage": b"init",
        "x-kind": b"poison",
        "x-cause": b"not msgpack",
        "x-failed-at-ms": b"9",
    } == dict(found.headers)


async def test_a_record_without_key_and_value_is_buried_too():
    """No log takes such a record as it is, and the stream must go on."""
    found = await buried(Record("tasks", 0, 5, 7, None, None))

    assert (b"", None) == (found.value, found.key)


async def test_a_record_that_has_no_room_for_its_new_headers_is_cut():
    """Its size is in a header; a stage does not die of one huge record."""
    found = await buried(Record("tasks", 0, 5, 7, b"k" * 100, b"x" * RECORD_BYTES))

    assert 900_000 < len(found.value) < RECORD_BYTES
    assert DeadLetter(found).cut_from == RECORD_BYTES


@pytest.mark.parametrize(
    ("key", "headers", "dropped"),
    [
        (b"k", (("mine", b"1" * RECORD_BYTES),), "headers"),
        (b"k", (("a", b""),) * 400_000, "headers"),
        (b"k" * RECORD_BYTES, (("mine", b"1"),), "key"),
        (b"k" * RECORD_BYTES, (("mine", b"1" * RECORD_BYTES),), "headers,key"),
        (b"k" * 500_000, (("mine", b"1" * 500_000),), "headers"),
    ],
    ids=["a header", "headers of nothing", "key", "both", "together"],
)
async def test_a_record_whose_key_and_headers_leave_no_room_loses_them_and_says_so(key, headers, dropped):
    """Its value and the whole cause are kept: one foreign record must not end every owner of its partition."""
    cause = "x" * 2_000
    found = await buried(Record("tasks", 0, 5, 7, key, b"value", headers), replace(POISON, cause=cause))
    letter = DeadLetter(found)

    assert (dropped, b"value", cause, None) == (letter.dropped, found.value, letter.death.cause, letter.cut_from)
    assert letter.original.key == (None if "key" in dropped else key)
    assert letter.original.headers == (() if "headers" in dropped else headers)


async def test_a_cause_is_bounded_and_may_hold_anything():
    """The text of an error may quote the bytes it is about."""
    found = await buried(RECORD, replace(POISON, cause="\udce4" + "x" * 10_000))

    assert len(dict(found.headers)["x-cause"]) == 2_000


@pytest.mark.parametrize("death", [POISON, EXHAUSTED], ids=["poison", "exhausted"])
async def test_a_letter_gives_back_what_was_buried(death):
    """The record as it lay, its headers without ours, and the reason."""
    letter = DeadLetter(await buried(RECORD, death))

    assert (RECORD, death, 9, None) == (letter.original, letter.death, letter.died_ms, letter.cut_from)
    assert ("3:0", "r/g/2") == (letter.id, await letter.sample())


async def test_a_letter_that_was_buried_once_more_speaks_of_its_last_death():
    """Headers of an earlier one are the record's own by then."""
    first = await buried(RECORD, EXHAUSTED)
    letter = DeadLetter(await buried(first, POISON))

    assert (first.headers, POISON) == (letter.original.headers, letter.death)


@pytest.mark.parametrize(
    "headers",
    [(), (("x-cut-from", b"12"),), (("x-orig-topic", b"\xff"), ("x-attempts", b"-1"), ("x-orig-offset", b"9" * 40))],
    ids=["none", "not ours", "nonsense"],
)
async def test_a_letter_of_somebody_else_is_read_as_far_as_it_goes(headers):
    """Anyone may write to `dead`."""
    letter = DeadLetter(Record("dead", 1, 2, 3, None, b"x", headers))

    assert ("1:2", 3, None, "") == (letter.id, letter.died_ms, letter.cut_from, await letter.sample())
    assert (0, None) == (letter.original.offset, letter.death.attempts)
    with pytest.raises(DecodeError, match="which is no topic"):
        await letter.message()


async def test_a_letter_is_read_as_a_record_of_the_topic_it_came_from():
    """Also without headers that name its sample: a foreign producer may leave them out."""
    task = make_task(sample=2, samples=4)
    letter = DeadLetter(await buried(Record("init.retry.30s", 3, 5, 7, None, codec.encode(task)), EXHAUSTED))

    assert (task, "test/g0/2") == (await letter.message(), await letter.sample())


async def test_a_cut_letter_is_not_read_as_if_it_were_whole():
    """What is left may even be readable."""
    value = codec.encode(make_task()) + b"\xc0" * RECORD_BYTES
    letter = DeadLetter(await buried(Record("tasks", 0, 5, 7, None, value)))

    with pytest.raises(DecodeError, match=f"of its {len(value)} bytes are kept"):
        await letter.message()
