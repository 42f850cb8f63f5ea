"""What a disk, a kill and a second process may do to blobs in a directory."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from infra.blobs import KEEP_MS, BlobLost, BlobsAway
from infra.blobs.directory import LEFTOVER_MS, DirectoryBlobs
from infra.clock import SystemClock, VirtualClock

ROOT = Path(__file__).parents[3]
DATA = b"0123456789" * 100_000
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
async def store(tmp_path, clock):
    store = DirectoryBlobs(tmp_path / "blobs", clock)
    await store.create()
    return store


def path(store, digest=DIGEST):
    return store.root / digest[:2] / digest


def files(store):
    return sorted(found.name for found in store.root.rglob("*") if found.is_file())


HANGS = """
import asyncio, sys, time
from pathlib import Path
from infra.blobs.directory import DirectoryBlobs
from infra.clock import SystemClock

class Hangs(DirectoryBlobs):
    def _fill(self, file, data):
        super()._fill(file, data[: int(len(data) * float(sys.argv[2]))])
        file.flush()
        print("written", flush=True)
        time.sleep(600)

asyncio.run(Hangs(Path(sys.argv[1]), SystemClock()).put(b"0123456789" * 100_000))
"""


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_a_writer_that_is_killed_leaves_nothing_that_is_served(store, clock, share):
    """Half a blob, and a whole one that nobody said is whole, are not there; a collection clears them away."""
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HANGS, str(store.root), str(share), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        async with asyncio.timeout(60):
            assert b"written\n" == await writer.stdout.readline()
    finally:
        writer.send_signal(signal.SIGKILL)
        await writer.wait()

    with pytest.raises(BlobLost):
        await store.get(DIGEST)
    assert [] == await store.stock()
    (left,) = files(store)
    later = DirectoryBlobs(store.root, VirtualClock(SystemClock().now_ms() + LEFTOVER_MS + 600_000))
    await store.collect()
    assert [left] == files(store)
    await later.collect()
    assert [] == files(store)
    assert DATA == await store.get(await store.put(DATA))


LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from infra.blobs import BlobsAway
from infra.blobs.directory import DirectoryBlobs
from infra.clock import SystemClock

async def main():
    store = DirectoryBlobs(Path(sys.argv[1]), SystemClock())
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    try:
        await store.put(b"0123456789" * 100_000)
    except BlobsAway as error:
        print(error)
    print(await store.put(b"small"))

asyncio.run(main())
"""


async def test_a_file_that_may_not_grow_is_an_error_and_leaves_nothing(store):
    """The kernel's own refusal, in a process that may write 300 kB files; what fits is taken."""
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LIMITED, str(store.root), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    async with asyncio.timeout(60):
        said, _ = await writer.communicate()
    error, digest = said.decode().splitlines()

    assert error.startswith(f"storing a blob of 1000000 bytes in {store.root}: File too large; nothing half-written")
    assert [digest] == files(store)


class FullDisk(DirectoryBlobs):
    """A store on a disk that takes ten bytes."""

    def _fill(self, file, data):
        super()._fill(file, data[:10])
        with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123 - says what a full disk says
            full.write(data[10:])


async def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing(store, clock):
    """No half file takes up the room that is wanted."""
    full = FullDisk(store.root, clock)
    with pytest.raises(BlobsAway, match="No space left on device; nothing half-written is left"):
        await full.put(DATA)

    assert [] == files(store)
    with pytest.raises(BlobLost):
        await full.get(DIGEST)


async def test_a_pin_that_does_not_fit_leaves_the_old_ones(store, clock):
    """Pins are written as blobs are: whole or not at all."""
    await store.pin("run", [DIGEST])
    with pytest.raises(BlobsAway, match="pinning the blobs of run"):
        await FullDisk(store.root, clock).pin("run", ["0" * 64])

    assert {"run": {DIGEST}} == await store.pins()


async def test_a_file_system_that_is_not_mounted_is_an_outage_and_no_loss(store, tmp_path):
    """Its mount point is an empty directory: nothing is known about any blob, and nothing is written there."""
    await store.put(DATA)
    store.root.rename(tmp_path / "elsewhere")
    for call in (store.get(DIGEST), store.check(), store.put(DATA), store.stock(), store.collect(), store.pins()):
        with pytest.raises(BlobsAway, match="no blob store"):
            await call
    store.root.mkdir()
    for call in (store.get(DIGEST), store.check(), store.put(DATA), store.pin("run", [DIGEST])):
        with pytest.raises(BlobsAway, match="Is its file system mounted"):
            await call

    assert [] == list(store.root.iterdir())
    store.root.rmdir()
    (tmp_path / "elsewhere").rename(store.root)
    assert DATA == await store.get(DIGEST)


async def test_what_the_disk_says_against_a_read_is_an_outage(store):
    """An error that is not the blob's absence proves nothing about it."""
    path(store).mkdir(parents=True)
    with pytest.raises(BlobsAway, match=f"reading blob {DIGEST} in {store.root}: Is a directory"):
        await store.get(DIGEST)


async def test_a_collection_that_was_killed_half_way_loses_nothing(store, clock):
    """It has put aside what it meant to delete: that is served, and the next collection decides anew."""
    names = [await store.put(data) for data in (b"old", b"pinned", b"young")]
    await store.pin("run", [names[1]])
    await clock.advance(KEEP_MS / 1000 + 1)
    await store.put(b"young")
    for name in names:
        path(store, name).rename(path(store, f"{name}.gone"))

    assert [b"old", b"pinned", b"young"] == [await store.get(name) for name in names]
    assert set(names) == {blob.digest for blob in await store.stock()}
    assert (1, 3) == ((found := await store.collect()).blobs, found.size)
    assert sorted([*names[1:], "run.txt"]) == files(store)
    assert [b"pinned", b"young"] == [await store.get(name) for name in names[1:]]


async def test_a_blob_that_is_put_while_it_is_being_deleted_is_written_anew(store, clock):
    """The collection has taken its name away; the put must not count on the old file."""
    await store.put(DATA)
    await clock.advance(KEEP_MS / 1000 + 1)
    path(store).rename(path(store, f"{DIGEST}.gone"))
    await store.put(DATA)

    assert 1 == (await store.collect()).blobs
    assert [DIGEST] == files(store)
    assert DATA == await store.get(DIGEST)


async def test_a_blob_that_was_put_anew_keeps_its_time_when_its_old_file_comes_back(store, clock):
    """A pin brings back what a killed collection had put aside; once it is released, the later put still counts."""
    await store.put(DATA)
    await store.pin("run", [DIGEST])
    await clock.advance(KEEP_MS / 1000 + 1)
    path(store).rename(path(store, f"{DIGEST}.gone"))
    await store.put(DATA)

    assert 0 == (await store.collect()).blobs
    assert sorted([DIGEST, "run.txt"]) == files(store)
    await store.unpin("run")
    assert 0 == (await store.collect()).blobs
    assert DATA == await store.get(DIGEST)


async def test_what_is_no_blob_is_left_alone(store, clock):
    """A directory may hold other files; a collection knows its own by their names."""
    await store.put(b"x")
    notes = store.root / "ab" / "notes.txt"
    notes.parent.mkdir(exist_ok=True)
    notes.write_text("mine")
    (store.root / "incoming" / "my.own.file").write_text("mine too")
    await clock.advance(KEEP_MS / 1000 + 1)

    assert 1 == (await store.collect()).blobs
    assert ["my.own.file", "notes.txt"] == files(store)


class Watched(DirectoryBlobs):
    """Remembers in which threads the disk is used."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.threads = []

    async def _disk(self, doing, work, *arguments):
        def noted():
            self.threads.append(threading.get_ident())
            return work(*arguments)

        return await super()._disk(doing, noted)


async def test_the_disk_is_used_off_the_event_loop(tmp_path, clock):
    """A disk that is slow keeps no heartbeat."""
    store = Watched(tmp_path / "blobs", clock)
    await store.create()
    await store.get(await store.put(DATA))
    await store.refresh(DIGEST)
    await store.pin("run", [DIGEST])
    await store.unpin("run")
    await store.stock()
    await store.collect()

    assert 8 == len(store.threads)
    assert threading.get_ident() not in store.threads


async def test_without_the_list_of_what_is_kept_nothing_is_collected(store, clock):
    """It was removed by mistake, or the directory was copied without it."""
    digest = await store.put(b"kept")
    await store.pin("run", [digest])
    for path in (store.root / "pins").iterdir():
        path.unlink()
    (store.root / "pins").rmdir()
    await clock.advance(KEEP_MS / 1000 + 1)

    with pytest.raises(BlobsAway, match="has no folder `pins`"):
        await store.collect()
    assert b"kept" == await store.get(digest)


class Full(DirectoryBlobs):
    """A directory on a disk that takes no more."""

    def _fill(self, file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_probe_finds_out_what_a_put_would(store, clock):
    """A disk that takes no more, and a directory that is no store; nothing is left of it."""
    await store.probe()
    with pytest.raises(BlobsAway, match=r"writing to the blob store in .*: No space left"):
        await Full(store.root, clock).probe()
    assert [] == files(store)
    (store.root / "incoming").rmdir()
    with pytest.raises(BlobsAway, match="is no blob store"):
        await store.probe()
