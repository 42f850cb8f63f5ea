"""The digest of a batch: what makes two trainer steps the same step.

The same members in the same order, each with the same bytes, place and shaped reward; epoch, time and weights do not
count. Which samples make a batch is decided in `trainer/groups.py`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from schemas.decisions import Member


def content_hash(value: bytes) -> str:
    """Return the SHA-256 of a record's uncompressed wire bytes."""
    return hashlib.sha256(value).hexdigest()


def batch_digest(members: Iterable[Member]) -> str:
    """Return the SHA-256 over the ordered (group, sample, offset, content hash, shaped reward as float64 LE)."""
    digest = hashlib.sha256()
    for member in members:
        digest.update(f"{member.group}\0{member.sample}\0{member.offset}\0{member.content}\0".encode())
        digest.update(struct.pack("<d", member.reward))
    return digest.hexdigest()
