"""Where values lie that are too large for the log: a content-addressed store, as a protocol.

A blob is named by the SHA-256 of its bytes; the record that speaks of it carries the name (`infra/claims.py`).
Implementations: `directory.py`, and `memory.py`, its twin; `tests/contract/test_blobs.py` holds both to this page. A
store of another kind (S3) is one more file. Promises:

- `put` returns once the blob is durable; putting the same bytes again, from anywhere, refreshes its time and heals it;
- `get` returns the very bytes that were put, or says why not: BlobLost is a fact about the blob and will not pass,
  BlobsAway one about the store, as an outage of the log is one about the log;
- what was not put to its end is never served;
- `collect` deletes what is older than it is told and not pinned, never what was put or refreshed since;
- no call keeps the event loop.

What is in a blob, and which records speak of it, is not known here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from infra.errors import BusError, RollmillError, TooLarge
from schemas.limits import VALUE_BYTES
from schemas.topics import HOUR_MS, LONG_MS

BLOB_BYTES = VALUE_BYTES
"""Largest blob, in bytes."""

KEEP_MS = LONG_MS + 24 * HOUR_MS
"""Age from which a blob may be collected, milliseconds: by then no topic holds a record that was written with it. The
day is for clocks that differ and for brokers that delete by segments."""

DIGEST = re.compile(r"[0-9a-f]{64}")
"""The name of a blob."""


class BlobLost(RollmillError):
    """The blob is not in the store, or not as it was put: trying again will not help."""


class BlobsAway(BusError):
    """The store is unreachable, full or refuses: nothing is known about the blob."""


@dataclass(frozen=True, slots=True)
class Blob:
    """One blob, as the store knows it."""

    digest: str
    """SHA-256 of its bytes, in lower-case hex: its name."""
    size: int
    """Its bytes."""
    time_ms: int
    """When it was last put or refreshed, milliseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection deleted."""

    blobs: int
    """How many."""
    size: int
    """Their bytes together."""


class BlobStore(Protocol):
    """A store of blobs. Every call raises BlobsAway when the store cannot do its part."""

    async def create(self) -> None:
        """Make the store where there is none; what it holds already stays."""
        ...

    async def check(self) -> None:
        """Raise BlobsAway if there is no store."""
        ...

    async def probe(self) -> None:
        """Raise BlobsAway unless there is a store that takes something; nothing stays of it."""
        ...

    async def put(self, data: bytes) -> str:
        """Keep these bytes, durably, and return their name. Raises TooLarge beyond BLOB_BYTES."""
        ...

    async def get(self, digest: str) -> bytes:
        """Return the bytes of this name. Raises BlobLost."""
        ...

    async def refresh(self, digest: str) -> bool:
        """Set the time of a blob to now, as `put` does; False if it is not there."""
        ...

    async def pin(self, name: str, digests: Collection[str]) -> None:
        """Keep these blobs from collection, in addition to what the same name keeps already."""
        ...

    async def unpin(self, name: str) -> bool:
        """Let go of all that a name keeps; False if it kept nothing."""
        ...

    async def pins(self) -> Mapping[str, frozenset[str]]:
        """Return name -> digests that it keeps."""
        ...

    async def stock(self) -> list[Blob]:
        """Return every blob, in no order."""
        ...

    async def collect(self, keep_ms: int = KEEP_MS) -> Collected:
        """Delete the blobs that are older than this and not pinned."""
        ...


def collectable(
    stock: Iterable[Blob], pins: Mapping[str, Collection[str]], now_ms: int, keep_ms: int = KEEP_MS
) -> list[Blob]:
    """Return the blobs that a collection at this time would delete."""
    pinned = frozenset[str]().union(*pins.values())
    return [blob for blob in stock if blob.time_ms < now_ms - keep_ms and blob.digest not in pinned]


def digest_of(data: bytes) -> str:
    """Return the name of these bytes. Raises TooLarge."""
    if len(data) > BLOB_BYTES:
        raise TooLarge(f"a blob of {len(data)} bytes; the store takes at most {BLOB_BYTES}")
    return hashlib.sha256(data).hexdigest()


def verified(digest: str, data: bytes, where: str) -> bytes:
    """Return the bytes if their name is the one asked for. Raises BlobLost."""
    if hashlib.sha256(data).hexdigest() != digest:
        raise BlobLost(f"blob {digest} in {where} is damaged: its {len(data)} bytes have another SHA-256")
    return data


def missing(digest: str, where: str) -> BlobLost:
    """Return the error of a blob that is not there."""
    return BlobLost(
        f"no blob {digest} in {where}: it was collected, or never put there. Do all services use the same bus.blobs?"
    )
