"""Blobs as files of one directory, which every service sees, on this machine or by a shared file system.

    <root>/<first two digits>/<digest>         a blob; its modification time is when it was last put or refreshed
    <root>/<first two digits>/<digest>.gone    one that a collection is about to delete
    <root>/incoming/<digest>.<time>.<random>   one that is being written since then, milliseconds
    <root>/pins/<name>.txt                     what a name keeps, one digest a line

There is no lock: any number of processes may put, get and collect. A blob is written aside, synced and renamed, so a
name stands for all of its bytes or is not there. A collection first renames what it means to delete and looks at its
time again: a `put` that came before the rename is seen, one that comes after it writes anew. A directory without
`incoming` is no store: a file system that is not mounted must look like an outage, not like a loss of all blobs.

An error of the disk is not waited out here: the kernel has, and whoever supervises the service starts it again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import quote, unquote

from infra.blobs import BLOB_BYTES, DIGEST, KEEP_MS, Blob, BlobsAway, Collected, digest_of, missing, verified
from infra.clock import Clock
from infra.disk import is_full
from schemas.topics import HOUR_MS

T = TypeVar("T")

LEFTOVER_MS = 24 * HOUR_MS
"""A file in `incoming` that is older was left by a writer that was killed, milliseconds."""

_MS = 1_000_000
"""Nanoseconds in a millisecond."""


class DirectoryBlobs:
    """A store in a directory (`infra.blobs.BlobStore`)."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self.root = root
        self._clock = clock
        self._incoming = root / "incoming"
        self._pins = root / "pins"

    async def create(self) -> None:
        """Make the directory where there is none."""
        await self._disk("creating a blob store", self._create)

    async def check(self) -> None:
        """Raise BlobsAway if the directory is no store."""
        await self._disk("looking for the blob store", self._require)

    async def probe(self) -> None:
        """Raise BlobsAway unless a file can be written there."""
        await self._disk("writing to the blob store", self._probe)

    async def put(self, data: bytes) -> str:
        """Keep these bytes, durably, and return their name."""
        return await self._disk(f"storing a blob of {len(data)} bytes", self._put, data)

    async def get(self, digest: str) -> bytes:
        """Return the bytes of this name."""
        return await self._disk(f"reading blob {digest}", self._get, digest)

    async def refresh(self, digest: str) -> bool:
        """Set the time of a blob to now; False if it is not there."""
        return await self._disk(f"refreshing blob {digest}", self._refresh, digest)

    async def pin(self, name: str, digests: Collection[str]) -> None:
        """Keep these blobs from collection."""
        await self._disk(f"pinning the blobs of {name}", self._pin, name, digests)

    async def unpin(self, name: str) -> bool:
        """Let go of all that a name keeps."""
        return await self._disk(f"releasing the blobs of {name}", self._unpin, name)

    async def pins(self) -> Mapping[str, frozenset[str]]:
        """Return name -> digests that it keeps."""
        return await self._disk("reading the pins", self._all_pins)

    async def stock(self) -> list[Blob]:
        """Return every blob."""
        return await self._disk(
            "listing the blobs", lambda: list({blob.digest: blob for _, blob in self._walk()}.values())
        )

    async def collect(self, keep_ms: int = KEEP_MS) -> Collected:
        """Delete the blobs that are older than this and not pinned, and what killed writers left."""
        return await self._disk("collecting blobs", self._collect, keep_ms)

    async def _disk(self, doing: str, work: Callable[..., T], *arguments: object) -> T:
        """Do something with the disk in a thread; what the disk says against it is a BlobsAway."""
        try:
            return await asyncio.to_thread(work, *arguments)
        except OSError as error:
            why = f"{doing} in {self.root}: {error.strerror or error}"
            if is_full(error):
                why += "; nothing half-written is left. Make room there: `rollmill blobs status` says what it holds"
            raise BlobsAway(why) from error

    # Everything below runs in a thread.

    def _create(self) -> None:
        for folder in (self.root, self._incoming, self._pins):
            folder.mkdir(parents=True, exist_ok=True)
            _sync(folder.parent)

    def _require(self) -> None:
        if not self._incoming.is_dir():
            raise BlobsAway(
                f"{self.root} is no blob store: it has no folder `incoming`. Is its file system mounted? "
                "A new store is made by `rollmill broker topics --create`; bus.blobs says where it is"
            )

    def _put(self, data: bytes) -> str:
        digest = digest_of(data)
        path = self._path(digest)
        if not (self._refresh(digest) and _holds(path, data)):
            self._require()
            self._write(path, data)
        return digest

    def _probe(self) -> None:
        self._require()
        part = self._part("probe")
        try:
            self._write_part(part, b"probe")
        finally:
            part.unlink(missing_ok=True)

    def _part(self, name: str) -> Path:
        return self._incoming / f"{name}.{self._clock.now_ms()}.{secrets.token_hex(8)}"

    def _write_part(self, part: Path, data: bytes) -> None:
        with part.open("xb") as file:
            self._fill(file, data)
            file.flush()
            os.fsync(file.fileno())

    def _write(self, path: Path, data: bytes) -> None:
        """Put a file in its place, whole."""
        part = self._part(path.name)
        try:
            self._write_part(part, data)
            self._touch(part)
            path.parent.mkdir(exist_ok=True)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync(path.parent)
        _sync(self.root)

    def _fill(self, file: BinaryIO, data: bytes) -> None:
        """Write the bytes: the step at which a disk runs full."""
        file.write(data)

    def _get(self, digest: str) -> bytes:
        path = self._path(digest)
        # It may be on its way to deletion, or back, since a `put` has refreshed it.
        for place in (path, _aside(path), path):
            try:
                with place.open("rb") as file:
                    data = file.read(BLOB_BYTES + 1)
            except FileNotFoundError:
                continue
            return verified(digest, data, str(self.root))
        self._require()
        raise missing(digest, str(self.root))

    def _refresh(self, digest: str) -> bool:
        path = self._path(digest)
        try:
            # By name: after a collection's rename it must fail, so that the blob is written anew.
            self._touch(path)
            _sync(path)
        except (FileNotFoundError, PermissionError):  # somebody else's file is replaced by one of ours
            return False
        return True

    def _touch(self, path: Path) -> None:
        now = self._clock.now_ms() * _MS
        os.utime(path, ns=(now, now))

    def _pin(self, name: str, digests: Collection[str]) -> None:
        self._require()
        path = self._pin_path(name)
        known = frozenset(path.read_text().split()) if path.exists() else frozenset()
        self._write(path, "".join(f"{digest}\n" for digest in sorted(known.union(digests))).encode())

    def _unpin(self, name: str) -> bool:
        self._require()
        try:
            self._pin_path(name).unlink()
        except FileNotFoundError:
            return False
        _sync(self._pins)
        return True

    def _all_pins(self) -> dict[str, frozenset[str]]:
        self._require()
        if not self._pins.is_dir():  # without it a collection would take everything for unpinned
            raise BlobsAway(
                f"{self.root} has no folder `pins`, so nobody knows what is kept: was it removed, or not copied along? "
                "`rollmill broker topics --create` makes it anew, and `rollmill keep RUN` what it held"
            )
        return {unquote(path.stem): frozenset(path.read_text().split()) for path in self._pins.glob("*.txt")}

    def _walk(self) -> Iterator[tuple[Path, Blob]]:
        """Yield every blob with its file, also those that a killed collection has left aside."""
        self._require()
        for path in self.root.glob("[0-9a-f][0-9a-f]/*"):
            digest = path.name.removesuffix(".gone")
            if DIGEST.fullmatch(digest):
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue  # another collection was faster
                yield path, Blob(digest, found.st_size, found.st_mtime_ns // _MS)

    def _collect(self, keep_ms: int) -> Collected:
        pinned = frozenset[str]().union(*self._all_pins().values())
        now = self._clock.now_ms()
        # Nothing is older than 0: what is pinned goes back if an earlier collection has left it aside.
        limits = ((path, blob, 0 if blob.digest in pinned else now - keep_ms) for path, blob in self._walk())
        deleted = [blob for path, blob, before in limits if _deleted(path, before)]
        for part in self._incoming.glob("*.*.*"):
            since = part.name.split(".")[-2]
            if since.isdecimal() and int(since) < now - LEFTOVER_MS:
                part.unlink(missing_ok=True)
        return Collected(len(deleted), sum(blob.size for blob in deleted))

    def _path(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):  # it came from a record that anyone may have written
            raise missing(digest, str(self.root))
        return self.root / digest[:2] / digest

    def _pin_path(self, name: str) -> Path:
        return self._pins / f"{quote(name, safe='')}.txt"


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.gone")


def _deleted(path: Path, before: int) -> bool:
    """Delete a blob's file if it is older than this, also if it lies aside; tell whether this call did."""
    is_aside = path.name.endswith(".gone")
    home = path.with_name(path.name.removesuffix(".gone"))
    if not is_aside and not _older(path, before):
        return False
    try:
        if not is_aside:
            path.rename(_aside(home))
        # Once more: a `put` may have refreshed it. From here on one finds no such name, and writes anew.
        if _older(_aside(home), before):
            _aside(home).unlink()
            return True
        _put_back(home)
    except FileNotFoundError:
        pass  # another collection was faster
    return False


def _put_back(home: Path) -> None:
    """Give a blob that lies aside its name again, unless it was put anew meanwhile: that one is younger."""
    with suppress(FileExistsError):
        home.hardlink_to(_aside(home))  # a rename would replace the younger one
    _aside(home).unlink()


def _older(path: Path, before: int) -> bool:
    """Tell whether a file that is still there was last put or refreshed before this time, in milliseconds."""
    try:
        return path.stat().st_mtime_ns // _MS < before
    except FileNotFoundError:
        return False


def _holds(path: Path, data: bytes) -> bool:
    """Tell whether a file holds these bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(data) + 1) == data
    except FileNotFoundError:
        return False  # a collection has it aside, and will see that it was refreshed


def _sync(path: Path) -> None:
    """Make sure that a file or a folder's names outlive a power cut."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
