"""Values that a record cannot hold: they go to the store, and readers notice nothing unless the store fails them."""

from __future__ import annotations

import asyncio
import hashlib
import random

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.blobs import BlobsAway
from infra.blobs.memory import MemoryBlobs
from infra.bus import Record
from infra.claims import carried_bytes, claimed
from infra.clock import SystemClock, VirtualClock
from infra.dead_letter import Death, bury
from infra.errors import BusError, TooLarge
from infra.kafka import KafkaBus
from infra.memory import MemoryBus
from infra.stage import Done, Member, Stage
from infra.wire import Publisher, pack, unpack
from infra.worker import Limits
from schemas import claim
from schemas.batch import content_hash
from schemas.claim import ClaimCheck
from schemas.codec import DecodeError, decode, encode
from schemas.limits import COMPRESS_OVER, INLINE_BYTES, VALUE_BYTES
from schemas.messages import Episode
from schemas.outcome import Failed
from schemas.topics import CONTROL, DEAD, EPISODES, INIT_RETRY_5S, TABLE, TASKS, TRAJECTORIES
from tests.golden.samples import SAMPLES
from tests.logs import make_task, read_all, wait_until

NOISE = random.Random(11).randbytes(VALUE_BYTES)
"""Bytes that nothing compresses."""

BARE = len(encode(make_task(payload={"value": b"\0" * 70_000}))) - 70_000
"""Bytes of a message around a payload of any size that needs four bytes of length."""


class AwayBlobs(MemoryBlobs):
    """A store that does not answer while `away` is set."""

    away = False

    async def get(self, digest):
        self._answer()
        return await super().get(digest)

    async def put(self, data):
        self._answer()
        return await super().put(data)

    def _answer(self):
        if self.away:
            raise BlobsAway("reading a blob in /mnt/blobs: Stale file handle")


@pytest.fixture
def blobs():
    return AwayBlobs()


@pytest.fixture
async def bus(blobs):
    log = MemoryBus(blobs=blobs)
    await log.create_topics(TABLE)
    return log


def large(**changes):
    """Return a task that no record holds."""
    return make_task(payload={"value": NOISE[: INLINE_BYTES + 1]}, **changes)


async def sent(bus, task):
    """Publish a task and return its record."""
    await Publisher(bus, VirtualClock(), "test").publish(TASKS, task)
    return (await read_all(bus, TASKS))[-1]


SIZES = st.one_of(
    *(st.integers(limit - 1024, limit + 1024) for limit in (COMPRESS_OVER, INLINE_BYTES, INLINE_BYTES - 1024)),
    st.sampled_from([COMPRESS_OVER - 1024, INLINE_BYTES - 1000, INLINE_BYTES, INLINE_BYTES + 1000, VALUE_BYTES]),
)
"""Sizes of a message around each limit, in bytes."""


@settings(max_examples=60)
@given(size=SIZES, noise=st.booleans())
async def test_a_message_around_any_limit_comes_back_and_its_record_is_small(size, noise):
    """15, 16, 17 KiB; 899, 900, 901 kB; 16 MiB: whether it compresses or not."""
    bus = MemoryBus()
    await bus.create_topics(TABLE)
    room = size - BARE
    task = make_task(payload={"value": NOISE[:room] if noise else bytes(room)})
    record = await sent(bus, task)
    received = await unpack(TASKS, record, bus)

    # Length prefixes of msgpack are two bytes shorter below 64 KiB.
    assert size - 2 <= len(received.raw) <= size
    assert (task, encode(task)) == (received.message, received.raw)
    whole = len(record.value) + len(record.key) + sum(len(name) + len(text) for name, text in record.headers)
    assert whole <= INLINE_BYTES
    assert (claimed(record) is not None) == (len(await bus.blobs.stock()) == 1)


@pytest.mark.parametrize("extra", [0, 1])
async def test_the_limit_is_that_of_the_whole_record(bus, blobs, extra):
    """Key and headers count: one byte more and the value goes to the store."""
    beside, noise = 1_000, NOISE[: INLINE_BYTES - 1_000 - BARE + extra]
    packed = await pack(make_task(payload={"value": noise}), blobs, beside=lambda: beside)

    assert bool(extra) == (claim.HEADER in dict(packed.headers))
    assert extra == len(await blobs.stock())
    assert extra or len(packed.value) + beside == INLINE_BYTES


async def test_one_byte_over_the_cap_is_too_large(bus, blobs):
    """A store does not help: nobody would decode it, so nothing is sent or stored."""
    task = make_task(payload={"value": bytes(VALUE_BYTES - BARE + 1)})
    with pytest.raises(TooLarge, match=r"rollmill\.task: 16777217 bytes; at most 16777216 are carried"):
        await sent(bus, task)

    assert [] == await read_all(bus, TASKS)
    assert [] == await blobs.stock()


async def test_a_claim_check_can_be_seen_without_the_store(bus, blobs):
    """The header names the blob, the value says how to read it, and the blob is what would have been sent."""
    task = make_task(payload={"text": NOISE[:2_000_000].hex()})
    record = await sent(bus, task)
    (blob,) = await blobs.stock()
    headers = dict(record.headers)

    assert ClaimCheck(digest=blob.digest, size=blob.size, encoding="zstd") == decode(record.value, ClaimCheck)
    assert (blob.digest.encode(), b"rollmill.task") == (headers["claim-check"], headers["ce_type"])
    assert "content-encoding" not in headers
    assert encode(task) == zstandard.decompress(await blobs.get(blob.digest))
    assert len(record.value) < 200


async def test_a_readers_hash_is_over_the_message_and_not_over_the_reference(bus):
    """The trainer's digests do not depend on how a record came."""
    record = await sent(bus, large())
    received = await unpack(TASKS, record, bus)

    assert content_hash(encode(large())) == content_hash(received.raw)
    assert record is received.record


async def test_a_reader_can_tell_what_a_record_will_cost_it(bus, blobs):
    """Whoever bounds its memory counts the blob, and not the reference to it."""
    record = await sent(bus, large())
    (blob,) = await blobs.stock()

    assert (blob.size, len(BLOB)) == (carried_bytes(record), carried_bytes(await sent(bus, make_task())))
    assert 1 == carried_bytes(Record("tasks", 0, 0, 0, None, b"\xc1", ((claim.HEADER, b"x"),)))


async def test_the_same_value_is_stored_once(bus, blobs):
    """A retry or a second producer of the same bytes adds a record and no blob."""
    for _ in range(3):
        await sent(bus, large())

    assert 3 == len(await read_all(bus, TASKS))
    assert 1 == len(await blobs.stock())


async def test_current_state_is_never_a_claim_check(bus, blobs):
    """`control` keeps its records for ever, and the store no blob that long."""
    manifest = msgspec.structs.replace(SAMPLES["rollmill.run"], extra={"value": NOISE[:1_000_000]})
    with pytest.raises(TooLarge, match="`control` takes no more"):
        await Publisher(bus, VirtualClock(), "test").publish(CONTROL, manifest)
    assert [] == await blobs.stock()


async def test_names_that_fill_a_record_alone_are_too_large(bus):
    """A claim check replaces the value, not the key and the headers; the log itself is not asked to refuse."""
    with pytest.raises(TooLarge, match="with its key and headers; shorten the names"):
        await sent(bus, make_task(group="g" * 500_000))
    assert [] == await read_all(bus, TASKS)


BLOB = encode(make_task())
GOOD = ClaimCheck(digest=hashlib.sha256(BLOB).hexdigest(), size=len(BLOB))


def ticket(**changes):
    """Return a record with a claim check for BLOB, changed."""
    value = encode(msgspec.structs.replace(GOOD, **changes))
    headers = ((claim.HEADER, changes.get("digest", GOOD.digest).encode()),)
    return Record("tasks", 0, 7, 0, None, value, headers)


async def test_a_foreign_producer_may_send_a_plain_blob(bus, blobs):
    """Nothing but the two headers' rules is asked of it."""
    await blobs.put(BLOB)
    assert make_task() == (await unpack(TASKS, ticket(), bus)).message


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (ticket(digest="0" * 64), "claim check: no blob 0000"),
        (ticket(digest="../../etc/passwd"), "is no SHA-256"),
        (ticket(digest=GOOD.digest.upper()), "is no SHA-256"),
        (ticket(size=20 * 1024 * 1024), "20971520 bytes; at most 16777216"),
        (ticket(size=-1), "a blob of -1 bytes"),
        (ticket(size=len(BLOB) + 1), f"the blob has {len(BLOB)} bytes, not {len(BLOB) + 1}"),
        (ticket(encoding="gzip"), "encoding 'gzip' is not known"),
        (ticket(encoding="zstd"), "not zstd"),
        (Record("tasks", 0, 7, 0, None, b"\xc1", ((claim.HEADER, b"x"),)), "msgp"),
        (Record("tasks", 0, 7, 0, None, BLOB, ((claim.HEADER, b"x"),)), "expected rollmill.claim_check, found"),
        (Record("tasks", 0, 7, 0, None, ticket().value), "expected rollmill.task, found 'rollmill.claim_check'"),
        (Record("tasks", 0, 7, 0, None, None, ((claim.HEADER, b"x"),)), "not msgpack"),
    ],
)
async def test_a_claim_check_that_cannot_be_redeemed_is_unreadable(bus, blobs, record, says):
    """One clear outcome for a reference that is wrong in any way, before anything large is read."""
    await blobs.put(BLOB)
    with pytest.raises(DecodeError, match=says):
        await unpack(TASKS, record, bus)


async def test_a_bomb_in_a_blob_is_refused(bus, blobs):
    """The cap holds behind a claim check too."""
    bomb = zstandard.compress(bytes(VALUE_BYTES + 1))
    digest = await blobs.put(bomb)
    with pytest.raises(DecodeError, match="decompresses to over"):
        await unpack(TASKS, ticket(digest=digest, size=len(bomb), encoding="zstd"), bus)


async def test_a_damaged_blob_is_not_decoded(bus, blobs):
    """What is read is what was written, or nothing."""
    record = await sent(bus, large())
    blobs.damage(claimed(record))
    with pytest.raises(DecodeError, match="damaged"):
        await unpack(TASKS, record, bus)


async def test_a_store_that_is_away_says_nothing_about_the_record(bus, blobs):
    """An outage of the log: whoever reads starts again, and nobody buries what may be whole."""
    record = await sent(bus, large())
    blobs.away = True
    with pytest.raises(BusError, match="Stale file handle"):
        await unpack(TASKS, record, bus)
    with pytest.raises(BusError, match="Stale file handle"):
        await sent(bus, large())
    blobs.away = False
    assert large() == (await unpack(TASKS, record, bus)).message


async def test_a_reader_without_a_store_is_told_which_setting_is_missing(bus):
    """Its configuration is wrong, and not the record."""
    record = await sent(bus, large())
    bus.blobs = None
    with pytest.raises(BusError, match=r"tasks, partition 0, offset 0 is a claim check .* set bus\.blobs"):
        await unpack(TASKS, record, bus)


async def test_a_buried_claim_check_stays_one_and_its_blob_lives_on(bus, blobs):
    """The copy keeps reference and headers, and from now on needs the blob for as long as `dead` is kept."""
    clock = VirtualClock()
    bus.blobs = blobs = MemoryBlobs(clock)
    record = await sent(bus, large())
    await clock.advance(86_400)
    await bury(bus, clock, record, Death(stage="init", cause="by request"))
    (dead,) = await read_all(bus, DEAD)
    (blob,) = await blobs.stock()

    assert record.value == dead.value
    assert set(record.headers) <= set(dead.headers)
    assert large() == (await unpack(TASKS, dead, bus)).message
    assert clock.now_ms() == blob.time_ms


@pytest.mark.parametrize("record", [ticket(digest="../x"), ticket(digest="0" * 64)], ids=["no digest", "lost"])
async def test_burying_does_not_fail_on_what_it_buries(bus, record):
    """A reference to nothing is buried like any poison."""
    await bury(bus, VirtualClock(), record, Death(stage="init", cause="lost"))
    assert 1 == len(await read_all(bus, DEAD))


class Init:
    """An INIT that notes what it gets; large tasks become large episodes."""

    def __init__(self, bus, **limits):
        self.seen = []
        limits = Limits(max_in_flight=8, poll_s=0.02, commit_every_s=0.02, **limits)
        stage = Stage(name="init", sources=(TASKS, INIT_RETRY_5S), sink=EPISODES, handle=self.handle)
        self.member = Member(stage, bus, SystemClock(), worker="init-test", limits=limits, first=True)
        self._bus = bus

    async def handle(self, task):
        self.seen.append(task.sample)
        size = task.payload.get("answer", 10)
        messages = ({"role": "user", "content": NOISE[:1] * size},)
        return Done(Episode(task=task, host="local:", lease="l", messages=messages))

    async def until_committed(self, count):
        """Work until this many tasks are done."""
        running = asyncio.create_task(self.member.run())

        async def committed():
            return sum(progress.offset for progress in (await self._bus.committed("init", TASKS.name)).values())

        await wait_until(committed, count, limit_s=30)
        self.member.stop()
        await asyncio.wait_for(running, 30)


async def test_a_stage_passes_large_messages_on(bus, blobs):
    """Claim check in, claim check out; each of them one blob."""
    await sent(bus, large())
    await Init(bus).until_committed(1)
    (record,) = await read_all(bus, EPISODES)

    assert claimed(record) is not None
    assert large() == (await unpack(EPISODES, record, bus)).message.task
    assert 2 == len(await blobs.stock())


async def test_a_lost_blob_costs_its_own_record_and_the_stream_goes_on(bus, blobs):
    """The record goes to `dead` with the cause."""
    blobs.lose(claimed(await sent(bus, large())))
    await sent(bus, make_task(sample=1))
    worker = Init(bus)
    await worker.until_committed(2)
    (dead,) = await read_all(bus, DEAD)

    assert [1] == worker.seen
    assert b"claim check: no blob" in dict(dead.headers)["x-cause"]


async def test_a_result_of_twenty_mebibytes_fails_its_own_sample_and_the_stream_goes_on(bus):
    """One clear outcome: a terminal record that says how large it was."""
    await sent(bus, make_task(payload={"answer": 20 * 1024 * 1024}))
    await sent(bus, make_task(sample=1))
    await Init(bus).until_committed(2)
    (record,) = await read_all(bus, TRAJECTORIES)
    outcome = (await unpack(TRAJECTORIES, record)).message.outcome

    assert isinstance(outcome, Failed)
    assert "TooLarge: rollmill.episode: 209" in outcome.cause
    assert "at most 16777216 are carried" in outcome.cause
    assert 1 == len(await read_all(bus, EPISODES))


async def test_a_store_that_is_away_stops_the_stage_and_loses_nothing(bus, blobs):
    """As when the log is away: nothing is buried, retried or committed, and the next start goes on."""
    await sent(bus, large())
    blobs.away = True
    with pytest.raises(BlobsAway):
        await asyncio.wait_for(Init(bus).member.run(), 30)
    assert [0, 0, 0] == [len(await read_all(bus, topic)) for topic in (DEAD, INIT_RETRY_5S, TRAJECTORIES)]

    blobs.away = False
    worker = Init(bus)
    await worker.until_committed(1)

    assert [0] == worker.seen
    assert 1 == len(await read_all(bus, EPISODES))


async def test_a_log_brings_the_store_that_it_was_made_with(bus):
    """No service can have the one without the other; a Kafka that was given none has none."""
    store = MemoryBlobs()

    assert (store, None) == (KafkaBus("here:1", blobs=store).blobs, KafkaBus("here:1").blobs)
    assert (store, True) == (MemoryBus(blobs=store).blobs, isinstance(bus.blobs, MemoryBlobs))
