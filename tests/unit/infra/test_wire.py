"""Messages as records: where they go, what is said beside them, and what a reader is safe from."""

from __future__ import annotations

import random
import re
import threading

import msgspec
import pytest
import zstandard
from hypothesis import given, settings

from infra import wire
from infra.bus import Headers, Record
from infra.clock import VirtualClock
from infra.errors import TooLarge
from infra.memory import MemoryBus
from infra.wire import TRACE_BYTES, Publisher, new_trace, pack, trace_of, unpack
from schemas.codec import DecodeError, encode
from schemas.control import Control
from schemas.limits import COMPRESS_OVER, INLINE_BYTES, VALUE_BYTES
from schemas.messages import Task
from schemas.partition import partition_for
from schemas.topics import CONTROL, DECISIONS, EPISODES, EVENTS, METRICS, TABLE, TASKS, TRAJECTORIES
from tests.golden.samples import NOW_MS, SAMPLES, TASK
from tests.logs import read_all
from tests.strategies import messages

ZSTD = (("content-encoding", b"zstd"),)
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOISE = random.Random(7).randbytes(INLINE_BYTES + 1)


@pytest.fixture
async def bus() -> MemoryBus:
    """A log in memory with every topic of the table."""
    log = MemoryBus()
    await log.create_topics(TABLE)
    return log


def task_with(payload: object) -> Task:
    """Return a task with something in its payload."""
    return msgspec.structs.replace(TASK, payload={"value": payload})


def record_of(value: bytes | None, headers: Headers = ()) -> Record:
    """Return a record on `tasks` with this value."""
    return Record(topic="tasks", partition=0, offset=0, timestamp_ms=0, key=None, value=value, headers=headers)


@settings(max_examples=30)
@given(message=messages(Task))
async def test_a_packed_message_unpacks(message):
    """A reader gets the message and the bytes that its content hash is over."""
    received = await unpack(TASKS, record_of(*await pack(message)))
    assert received.message == message
    assert received.raw == encode(message)


async def test_small_values_are_plain():
    """Most records are read without zstandard, and golden bytes are what is sent."""
    assert await pack(TASK) == (encode(TASK), ())


async def test_large_values_are_compressed():
    """A reader that knows the header gets the same message; the raw bytes are the uncompressed ones."""
    large = task_with("x" * COMPRESS_OVER)
    value, headers = await pack(large)
    assert headers == ZSTD
    assert len(value) < COMPRESS_OVER
    received = await unpack(TASKS, record_of(value, headers))
    assert (received.message, received.raw) == (large, encode(large))


async def test_compression_leaves_the_event_loop_alone(monkeypatch):
    """A large value is packed and unpacked in a thread, so that heartbeats go on."""
    seen = []
    compress, decompress = zstandard.compress, wire._decompress
    note = threading.get_ident
    monkeypatch.setattr(zstandard, "compress", lambda *given: seen.append(note()) or compress(*given))
    monkeypatch.setattr(wire, "_decompress", lambda *given: seen.append(note()) or decompress(*given))
    await unpack(TASKS, record_of(*await pack(task_with("x" * COMPRESS_OVER))))
    assert len(seen) == 2
    assert note() not in seen


async def test_what_a_record_cannot_hold_is_too_large_without_a_store():
    """The error says how large it was and which setting is missing, before anything is sent."""
    with pytest.raises(TooLarge, match=r"rollmill\.task: \d+ bytes, \d+ as sent; .* at most 900000 .* set bus\.blobs"):
        await pack(task_with(NOISE))


async def test_what_would_not_be_decoded_is_too_large():
    """A message that compresses well is still bounded: nobody could read it."""
    with pytest.raises(TooLarge, match="at most 16777216 are carried"):
        await pack(task_with(bytes(VALUE_BYTES)))


@pytest.mark.parametrize(
    "value",
    [b"", b"not zstd", zstandard.compress(encode(TASK))[:-4], zstandard.compress(encode(TASK))[:6]],
    ids=["empty", "other bytes", "cut", "cut header"],
)
async def test_what_is_not_zstd_is_a_decode_error(value):
    """The error keeps the bytes as they came."""
    with pytest.raises(DecodeError, match="not zstd") as caught:
        await unpack(TASKS, record_of(value, ZSTD))
    assert caught.value.data == value


async def test_a_bomb_is_refused_before_it_is_unpacked():
    """A few kilobytes that claim gigabytes cost no memory."""
    bomb = zstandard.compress(bytes(VALUE_BYTES + 1))
    with pytest.raises(DecodeError, match="decompresses to over"):
        await unpack(TASKS, record_of(bomb, ZSTD))


async def test_a_bomb_that_hides_its_size_is_refused():
    """A frame without a content size is unpacked into a bounded buffer."""
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(VALUE_BYTES + 1))
    with pytest.raises(DecodeError):
        await unpack(TASKS, record_of(bomb, ZSTD))


async def test_a_frame_that_hides_its_size_is_read():
    """Streaming compressors of other languages do not write it."""
    value = zstandard.ZstdCompressor(write_content_size=False).compress(encode(TASK))
    assert (await unpack(TASKS, record_of(value, ZSTD))).message == TASK


@pytest.mark.parametrize("value", [None, b"", encode(SAMPLES["rollmill.rollout"])], ids=["none", "empty", "rollout"])
async def test_what_does_not_belong_on_the_topic_is_a_decode_error(value):
    """A record without a value, or with another topic's message, is unreadable here."""
    with pytest.raises(DecodeError):
        await unpack(TASKS, record_of(value))


@pytest.mark.parametrize(
    ("topic", "name", "key", "partition"),
    [
        (TRAJECTORIES, "rollmill.trajectory", TASK.group.encode(), partition_for(TASK.run, 8)),
        (DECISIONS, "rollmill.step", None, partition_for(TASK.run, 8)),
        (METRICS, "rollmill.metrics", None, partition_for(TASK.run, 4)),
    ],
    ids=str,
)
async def test_records_of_a_run_lie_in_its_partition(bus, topic, name, key, partition):
    """The partition is computed from the run, the key is the group."""
    position = await Publisher(bus, VirtualClock(), "run-3").publish(topic, SAMPLES[name])
    (record,) = await read_all(bus, topic)
    assert (record.key, record.partition) == (key, partition)
    assert (position.partition, position.offset) == (record.partition, record.offset)


async def test_samples_of_a_group_spread_over_a_stage_topic(bus):
    """One group's siblings do not queue up behind each other, although they share a key."""
    publisher = Publisher(bus, VirtualClock(), "feeder")
    for sample in range(8):
        await publisher.publish(TASKS, msgspec.structs.replace(TASK, sample=sample))
    found = await read_all(bus, TASKS)
    assert {record.key for record in found} == {TASK.group.encode()}
    assert len({record.partition for record in found}) == 8


async def test_a_sender_may_choose_the_partition(bus):
    """Events are batched by partition, so their sender has worked it out already."""
    await Publisher(bus, VirtualClock(), "run-3").publish(EVENTS, SAMPLES["rollmill.stage_events"], partition=3)
    assert [record.partition for record in await read_all(bus, EVENTS)] == [3]


KEYS = {"run", "credit", "cursor", "policy", "quarantine", "cancel", "breaker", "feeder", "backend"}
"""What the keys of `control` begin with."""


@pytest.mark.parametrize("name", [name for name, message in SAMPLES.items() if isinstance(message, Control)])
async def test_control_records_replace_their_key(bus, name):
    """The key is the name of the state, so that compaction keeps the last record of each."""
    await Publisher(bus, VirtualClock(), "trainer").publish(CONTROL, SAMPLES[name])
    (record,) = await read_all(bus, CONTROL)
    assert record.key is not None
    assert record.key.decode().split("/")[0] in KEYS
    assert (await unpack(CONTROL, record)).message == SAMPLES[name]


async def test_a_record_says_what_it_is(bus):
    """CloudEvents in binary mode: type, source and time can be read without unpacking the value."""
    await Publisher(bus, VirtualClock(NOW_MS), "run-3").publish(EPISODES, SAMPLES["rollmill.episode"], trace=TRACE)
    (record,) = await read_all(bus, EPISODES)
    headers = dict(record.headers)
    assert re.fullmatch(rb"[0-9a-f]{16}", headers.pop("ce_id"))
    assert headers == {
        "ce_specversion": b"1.0",
        "ce_type": b"rollmill.episode",
        "ce_source": b"run-3",
        "ce_time": b"2026-01-01T00:00:00.000+00:00",
        "content-type": b"application/msgpack",
        "traceparent": TRACE,
        "ce_subject": f"{TASK.run}/{TASK.group}/{TASK.sample}".encode(),
        "attempt": b"1",
        "deadline-ms": str(TASK.start_by_ms).encode(),
    }


async def test_a_message_without_a_sample_names_none(bus):
    """What speaks of no sample has no subject, attempt or deadline."""
    await Publisher(bus, VirtualClock(), "trainer").publish(DECISIONS, SAMPLES["rollmill.step"])
    (record,) = await read_all(bus, DECISIONS)
    assert not {"ce_subject", "attempt", "deadline-ms"} & {name for name, _ in record.headers}


async def test_a_compressed_record_says_so(bus):
    """Readers decompress what the header names, and nothing else."""
    await Publisher(bus, VirtualClock(), "feeder").publish(TASKS, task_with("x" * COMPRESS_OVER))
    (record,) = await read_all(bus, TASKS)
    assert dict(record.headers)["content-encoding"] == b"zstd"


async def test_a_trace_begins_where_none_is_given(bus):
    """Every record belongs to a trace; what it causes can be given the same one."""
    await Publisher(bus, VirtualClock(), "feeder").publish(TASKS, TASK)
    (record,) = await read_all(bus, TASKS)
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-01", trace_of(record) or b"")
    assert trace_of(record_of(b"")) is None
    assert new_trace() != new_trace()


async def test_a_trace_that_is_too_long_to_be_one_is_not_passed_on():
    """Anyone may write any header; what is copied from record to record must stay small."""
    assert trace_of(record_of(b"", (("traceparent", b"0" * TRACE_BYTES),))) == b"0" * TRACE_BYTES
    assert trace_of(record_of(b"", (("traceparent", b"0" * (TRACE_BYTES + 1)),))) is None
