"""What is tidied up once an hour, by the one service that reads the log from end to end: the reaper.

Blobs that no record can speak of any more are deleted. What is pinned stays, and so does what is young: time counts
only as far as the log itself has come, so that a machine whose clock runs ahead takes nothing for old, and a log on
which nothing happens ages no blob. A store that is away is left alone until the next hour: nothing waits for it.
"""

from __future__ import annotations

import logging

from infra.blobs import KEEP_MS, BlobsAway, BlobStore
from infra.clock import Clock
from schemas.topics import HOUR_MS

log = logging.getLogger(__name__)

EVERY_S = 3_600.0
"""Between two rounds, seconds."""


async def collect_blobs(store: BlobStore, clock: Clock, heard_ms: int) -> None:
    """Delete what is old, and say in one line what that was.

    Args:
        store: where.
        clock: time.
        heard_ms: timestamp of the latest record of the log, milliseconds since the epoch.
    """
    behind_ms = max(0, clock.now_ms() - heard_ms)
    try:
        found = await store.collect(KEEP_MS + behind_ms)
    except BlobsAway as error:
        log.warning("no blobs collected, tried again in %g s: %s", EVERY_S, error)
        return
    log.info(
        "%d blobs collected, %.1f MiB: older than %d days and pinned by nobody",
        found.blobs,
        found.size / 2**20,
        KEEP_MS // (24 * HOUR_MS),
    )
