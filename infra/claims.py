"""Claim checks: a record that holds the name of a blob instead of its value (`schemas/claim.py`).

The blob is durable before the record that speaks of it is written. A blob that is lost makes its record unreadable: a
DecodeError, so whoever reads it buries it and goes on. A store that is away says nothing about any record: a BusError,
as if the log itself were away, so nothing is buried, decided or committed. Which values go this way, and what is in
them, is `wire.py`'s business.
"""

from __future__ import annotations

from contextlib import suppress

from infra.blobs import BlobLost, BlobsAway, BlobStore
from infra.bus import Bus, Headers, Record
from schemas import codec
from schemas.claim import HEADER, ClaimCheck


async def check_in(blobs: BlobStore, value: bytes, encoding: str) -> tuple[bytes, Headers]:
    """Put a value into the store and return what the record holds instead: the claim check, and its header.

    Raises:
        BlobsAway: the store does not take it.
    """
    digest = await blobs.put(value)
    ticket = ClaimCheck(digest=digest, size=len(value), encoding=encoding)
    return codec.encode(ticket), ((HEADER, digest.encode()),)


async def redeem(record: Record, bus: Bus | None) -> tuple[bytes, str]:
    """Return the value that a claim check stands for, and its encoding.

    Raises:
        schemas.codec.DecodeError: it is none, or its blob is lost.
        BlobsAway: the log has no store, or it does not answer.
    """
    data = record.value or b""
    ticket = codec.decode(data, ClaimCheck)
    blobs = None if bus is None else bus.blobs
    if blobs is None:
        raise BlobsAway(
            f"{record.topic}, partition {record.partition}, offset {record.offset} is a claim check for blob "
            f"{ticket.digest}, and there is no store: set bus.blobs to the directory that its writer uses"
        )
    try:
        blob = await blobs.get(ticket.digest)
    except BlobLost as error:
        raise codec.DecodeError(f"claim check: {error}", data) from error
    if len(blob) != ticket.size:
        raise codec.DecodeError(f"claim check: the blob has {len(blob)} bytes, not {ticket.size}", data)
    return blob, ticket.encoding


async def refresh(record: Record, bus: Bus) -> None:
    """Let the blob of a record live as long as a copy of the record that is written now.

    A record without one, or whose blob is lost, is left as it is. Raises BlobsAway.
    """
    digest, blobs = claimed(record), bus.blobs
    if digest is not None and blobs is not None:
        with suppress(BlobLost):  # a digest that is none
            await blobs.refresh(digest)


def claimed(record: Record) -> str | None:
    """Return the digest of the blob that a record speaks of, if it is a claim check."""
    digest = record.header(HEADER)
    return None if digest is None else digest.decode(errors="replace")


def carried_bytes(record: Record) -> int:
    """Return the bytes of a record's value, or of the blob that it speaks of: what a reader holds in memory."""
    value = record.value or b""
    if claimed(record) is None:
        return len(value)
    try:
        return codec.decode(value, ClaimCheck).size
    except codec.DecodeError:
        return len(value)
