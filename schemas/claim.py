"""The claim check: what a record holds instead of a value that is too large for the log.

The value lies as a blob in the store that the readers and writers of a log share; this message names it. It appears on
any topic but `control`, with the header HEADER beside it, and no reader of messages gets to see it: `infra/claims.py`
redeems it. What the store is, is not known here.
"""

from __future__ import annotations

import re

from schemas.limits import VALUE_BYTES
from schemas.message import Message

HEADER = "claim-check"
"""Header of a record whose value is a claim check; its own value is the digest."""

ZSTD = "zstd"
"""`encoding` of a compressed blob."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class ClaimCheck(Message, frozen=True, kw_only=True, tag="rollmill.claim_check"):
    """Stands in a record for a value too large for it; the value is a blob."""

    digest: str
    """SHA-256 of the blob, in lower-case hex: its name in the store, and what a reader verifies."""
    size: int
    """Bytes of the blob."""
    encoding: str = ""
    """`zstd` if the blob is a compressed value, empty if it is a plain one."""

    def check(self) -> None:
        """Raise ValueError when no blob can be meant."""
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"digest {self.digest[:80]!r} is no SHA-256 in lower-case hex")
        if not 0 <= self.size <= VALUE_BYTES:
            raise ValueError(f"a blob of {self.size} bytes; at most {VALUE_BYTES} are carried")
        if self.encoding not in {"", ZSTD}:
            raise ValueError(f"encoding {self.encoding[:80]!r} is not known; expected {ZSTD!r} or nothing")
