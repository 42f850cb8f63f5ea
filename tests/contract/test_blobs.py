"""The promises of `infra/blobs`, on a directory and on its twin in memory."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.blobs import BLOB_BYTES, KEEP_MS, BlobLost, Collected, collectable
from infra.blobs.directory import DirectoryBlobs
from infra.blobs.memory import MemoryBlobs
from infra.clock import VirtualClock
from infra.errors import TooLarge
from schemas.topics import TABLE

DATA = b"a transcript of many tokens" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()
NOBODY = "0" * 64
"""The name of no blob."""


class Memory:
    """The twin, and what can happen to it."""

    def __init__(self, folder, clock):
        self.store = MemoryBlobs(clock)

    def lose(self, digest):
        self.store.lose(digest)

    def damage(self, digest):
        self.store.damage(digest)


class Directory:
    """The real one, and what can happen to it."""

    def __init__(self, folder, clock):
        self.store = DirectoryBlobs(folder / "blobs", clock)

    def path(self, digest):
        return self.store.root / digest[:2] / digest

    def lose(self, digest):
        self.path(digest).unlink()

    def damage(self, digest):
        data = self.path(digest).read_bytes()
        self.path(digest).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture(params=[Memory, Directory], ids=["memory", "directory"])
async def place(request, tmp_path, clock):
    """A store that was just made, and what can happen to it."""
    place = request.param(tmp_path, clock)
    await place.store.create()
    return place


@pytest.fixture
def store(place):
    return place.store


async def stock(store):
    """Return digest -> (size, time) of all blobs."""
    return {blob.digest: (blob.size, blob.time_ms) for blob in await store.stock()}


async def test_what_was_put_is_returned(store):
    """Byte for byte, under the SHA-256 of the bytes."""
    assert DIGEST == await store.put(DATA)
    assert DATA == await store.get(DIGEST)


@given(data=st.binary(max_size=300))
async def test_any_bytes_come_back(tmp_path_factory, data):
    """Also none at all; the name is the same in every store."""
    directory = DirectoryBlobs(tmp_path_factory.mktemp("store"), VirtualClock())
    await directory.create()
    memory = MemoryBlobs()

    assert await memory.put(data) == await directory.put(data)
    assert [data, data] == [await one.get(hashlib.sha256(data).hexdigest()) for one in (memory, directory)]


async def test_putting_again_keeps_one_blob_and_refreshes_its_time(store, clock):
    """Whoever sends the same value needs it for as long as if it were new."""
    await store.put(DATA)
    await clock.advance(60)
    await store.put(DATA)

    assert {DIGEST: (len(DATA), clock.now_ms())} == await stock(store)


async def test_many_may_put_and_get_one_blob_at_once(store):
    """Siblings share a payload: whoever has put it can read it, whatever the others do."""

    async def put_and_get():
        return await store.get(await store.put(DATA))

    assert [DATA] * 20 == await asyncio.gather(*(put_and_get() for _ in range(20)))
    assert [DIGEST] == list(await stock(store))


async def test_the_largest_blob_is_taken_and_no_larger_one(store):
    """The limit is that of a message."""
    largest = bytes(BLOB_BYTES)
    assert largest == await store.get(await store.put(largest))
    with pytest.raises(TooLarge, match=f"{BLOB_BYTES + 1} bytes; .* at most {BLOB_BYTES}"):
        await store.put(bytes(BLOB_BYTES + 1))
    assert 1 == len(await store.stock())


async def test_a_blob_that_is_not_there_is_lost(place):
    """The error names it; so for one that was removed."""
    with pytest.raises(BlobLost, match=f"no blob {NOBODY}"):
        await place.store.get(NOBODY)
    await place.store.put(DATA)
    place.lose(DIGEST)
    with pytest.raises(BlobLost, match=f"no blob {DIGEST}"):
        await place.store.get(DIGEST)


@pytest.mark.parametrize("name", ["", "..", "../" * 21 + "x", "/etc/passwd", DIGEST.upper(), DIGEST + "\n", "ü" * 64])
async def test_a_name_that_is_none_reaches_nothing(store, name):
    """It comes from a record that anyone may have written."""
    await store.put(DATA)
    with pytest.raises(BlobLost):
        await store.get(name)


async def test_a_damaged_blob_is_not_served_and_putting_it_again_heals_it(place):
    """Wrong bytes are worse than none."""
    await place.store.put(DATA)
    place.damage(DIGEST)
    with pytest.raises(BlobLost, match="damaged"):
        await place.store.get(DIGEST)

    await place.store.put(DATA)

    assert DATA == await place.store.get(DIGEST)


async def test_a_lost_blob_that_is_put_again_is_there(place):
    """A retry writes what its first attempt wrote."""
    await place.store.put(DATA)
    place.lose(DIGEST)
    await place.store.put(DATA)

    assert DATA == await place.store.get(DIGEST)


async def test_a_refresh_sets_the_time_and_says_whether_there_was_a_blob(store, clock):
    """For a copy of a record that is written later than the blob."""
    await store.put(DATA)
    await clock.advance(60)

    assert (True, False) == (await store.refresh(DIGEST), await store.refresh(NOBODY))
    assert {DIGEST: (len(DATA), clock.now_ms())} == await stock(store)


async def test_a_collection_deletes_what_is_older_than_any_record_and_nothing_else(store, clock):
    """Older than the longest retention of the table and a day; exactly as old is kept."""
    longest = max(topic.retention_ms for topic in TABLE if topic.retention_ms is not None)
    assert KEEP_MS == longest + timedelta(days=1) // timedelta(milliseconds=1)
    await store.put(b"old")
    await clock.advance(1)
    young = await store.put(b"young")

    await clock.advance(KEEP_MS / 1000 - 1)
    assert Collected(0, 0) == await store.collect()
    await clock.advance(1)
    assert Collected(1, 3) == await store.collect()

    assert [young] == list(await stock(store))
    assert b"young" == await store.get(young)


async def test_what_a_collection_would_delete_is_known_before(store, clock):
    """The same as it deletes: whoever asks sees no other figure than who collects."""
    old, pinned = await store.put(b"old"), await store.put(b"pinned")
    await store.pin("run", [pinned])
    await clock.advance(KEEP_MS / 1000)
    before = collectable(await store.stock(), await store.pins(), clock.now_ms())
    await clock.advance(1)
    await store.put(b"young")
    then = collectable(await store.stock(), await store.pins(), clock.now_ms())

    assert ([], [old]) == (before, [blob.digest for blob in then])
    assert Collected(1, 3) == await store.collect()


async def test_a_probe_leaves_nothing(store):
    """It only finds out whether the store would take something."""
    await store.probe()

    assert ([], {}) == (await store.stock(), dict(await store.pins()))


async def test_what_was_put_again_or_refreshed_is_young(store, clock):
    """Its newest record decides."""
    names = [await store.put(data) for data in (b"put again", b"refreshed", b"neither")]
    await clock.advance(KEEP_MS / 1000)
    await store.put(b"put again")
    await store.refresh(names[1])
    await clock.advance(1)

    assert 1 == (await store.collect()).blobs
    assert set(names[:2]) == set(await stock(store))


async def test_what_is_pinned_is_kept_until_every_name_lets_go(store, clock):
    """Two runs may share a blob; pins of one name add up."""
    first, second = await store.put(b"first"), await store.put(b"second")
    await store.pin("run-1", [first])
    await store.pin("run-1", [second])
    await store.pin("../run 2", [first])
    await clock.advance(KEEP_MS / 1000 + 1)
    assert {"run-1": {first, second}, "../run 2": {first}} == dict(await store.pins())

    assert 0 == (await store.collect()).blobs
    assert await store.unpin("run-1")
    assert 1 == (await store.collect()).blobs
    assert [first] == list(await stock(store))
    assert await store.unpin("../run 2")
    assert not await store.unpin("../run 2")
    assert Collected(1, 5) == await store.collect()
    assert {} == await stock(store)


async def test_making_a_store_again_keeps_what_it_holds(store):
    """Every start of a local system does."""
    await store.put(DATA)
    await store.pin("run-1", [DIGEST])

    await store.create()
    await store.check()

    assert DATA == await store.get(DIGEST)
    assert {"run-1": {DIGEST}} == dict(await store.pins())


async def test_puts_and_collections_at_once_lose_nothing_that_was_put(store, clock):
    """A blob that is old, and put again while it is collected, is there afterwards."""
    for _ in range(20):
        await store.put(DATA)
        await clock.advance(KEEP_MS / 1000 + 1)
        await asyncio.gather(store.collect(), store.put(DATA), store.collect())
        assert DATA == await store.get(DIGEST)
