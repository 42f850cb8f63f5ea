"""What the reaper tidies up: only what nobody can need."""

from __future__ import annotations

import pytest

from infra.blobs import KEEP_MS
from infra.blobs.directory import DirectoryBlobs
from infra.blobs.memory import MemoryBlobs
from producers.upkeep import collect_blobs

DAY_MS = 86_400_000


@pytest.fixture(params=["memory", "directory"])
async def store(request, tmp_path, clock):
    """A store on the test's clock."""
    store = MemoryBlobs(clock) if request.param == "memory" else DirectoryBlobs(tmp_path / "blobs", clock)
    await store.create()
    return store


async def left(store):
    return {blob.digest for blob in await store.stock()}


async def test_a_blob_is_old_by_the_time_of_the_log(store, clock):
    """A clock that runs years ahead, or a log in which nothing happened since, makes none old."""
    written_ms = clock.now_ms()
    digest = await store.put(b"value")
    await clock.advance(3 * KEEP_MS / 1000)
    found = []
    for heard_ms in (0, written_ms, written_ms + KEEP_MS, written_ms + KEEP_MS + 1):
        await collect_blobs(store, clock, heard_ms)
        found.append(await left(store))

    assert [{digest}, {digest}, {digest}, set()] == found


async def test_a_record_from_the_future_makes_nothing_old(store, clock):
    """Any producer may write any timestamp: our own clock has its say as well."""
    digest = await store.put(b"value")
    await clock.advance(KEEP_MS / 1000)
    await collect_blobs(store, clock, clock.now_ms() + 1_000 * DAY_MS)

    assert {digest} == await left(store)
