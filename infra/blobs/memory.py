"""Blobs in memory: the twin of `directory.py`, for the log in memory and for tests. Nothing is durable.

`lose` and `damage` play what happens to a real store; both exist for tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace

from infra.blobs import KEEP_MS, Blob, Collected, collectable, digest_of, missing, verified
from infra.clock import Clock, SystemClock

_HERE = "memory"
"""Where, in an error's text."""


class MemoryBlobs:
    """A store in this process (`infra.blobs.BlobStore`)."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._data: dict[str, bytes] = {}
        self._stock: dict[str, Blob] = {}
        self._pins: dict[str, frozenset[str]] = {}

    async def create(self) -> None:
        """Do nothing: memory is always there."""

    async def check(self) -> None:
        """Do nothing: memory is always there."""

    async def probe(self) -> None:
        """Do nothing: memory takes everything."""

    async def put(self, data: bytes) -> str:
        """Keep these bytes and return their name."""
        await asyncio.sleep(0)  # a real store suspends its caller
        digest = digest_of(data)
        self._data[digest] = data
        self._stock[digest] = Blob(digest, len(data), self._clock.now_ms())
        return digest

    async def get(self, digest: str) -> bytes:
        """Return the bytes of this name."""
        await asyncio.sleep(0)
        if digest not in self._data:
            raise missing(digest, _HERE)
        return verified(digest, self._data[digest], _HERE)

    async def refresh(self, digest: str) -> bool:
        """Set the time of a blob to now; False if it is not there."""
        if digest not in self._stock:
            return False
        self._stock[digest] = replace(self._stock[digest], time_ms=self._clock.now_ms())
        return True

    async def pin(self, name: str, digests: Collection[str]) -> None:
        """Keep these blobs from collection."""
        self._pins[name] = self._pins.get(name, frozenset()) | frozenset(digests)

    async def unpin(self, name: str) -> bool:
        """Let go of all that a name keeps."""
        return self._pins.pop(name, None) is not None

    async def pins(self) -> Mapping[str, frozenset[str]]:
        """Return name -> digests that it keeps."""
        return dict(self._pins)

    async def stock(self) -> list[Blob]:
        """Return every blob."""
        return list(self._stock.values())

    async def collect(self, keep_ms: int = KEEP_MS) -> Collected:
        """Delete the blobs that are older than this and not pinned."""
        old = collectable(self._stock.values(), self._pins, self._clock.now_ms(), keep_ms)
        for blob in old:
            self.lose(blob.digest)
        return Collected(len(old), sum(blob.size for blob in old))

    def lose(self, digest: str) -> None:
        """Forget a blob."""
        del self._data[digest], self._stock[digest]

    def damage(self, digest: str) -> None:
        """Change a byte of a blob."""
        data = self._data[digest]
        self._data[digest] = bytes([data[0] ^ 1]) + data[1:]
