"""The C heap of a service that runs for a month: what a batch needed goes back to the system when the batch is done.

glibc serves a large block from a mapping of its own, which goes back when it is freed. But with each one that is freed
it raises the size from which it does so, up to 32 MiB, and it gives every thread an arena; so the buffers of fetches
end up between small objects, where they can never be given back, and a service grows in steps for as long as it lives
(mallopt(3), M_MMAP_THRESHOLD and M_ARENA_MAX). Held at the size that it begins with, memory is flat after the first
thousand tasks.

Not for processes that compute with tensors: each of theirs would be mapped anew. It does not know what is allocated.
"""

from __future__ import annotations

import ctypes

LARGE_BYTES = 128 * 1024
"""Blocks from this size on are mapped: glibc's first value."""

RESERVE_BYTES = 4 * 1024 * 1024
"""So much is taken at the start and kept for what the records of a batch need: to give it back and take it again each
time costs a stage a tenth of its speed."""

_BLOCK_BYTES = LARGE_BYTES // 2

ARENAS = 1
"""One heap for all threads: they take turns in Python anyway."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Numbers of mallopt's parameters, as malloc.h has them."""


def hold_flat() -> bool:
    """Hold the heap as above; False, and nothing changes, where the C library is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {_M_TRIM_THRESHOLD: 2 * RESERVE_BYTES, _M_MMAP_THRESHOLD: LARGE_BYTES, _M_ARENA_MAX: ARENAS}
    if not all(mallopt(parameter, value) for parameter, value in wanted.items()):
        return False
    reserve = [bytearray(_BLOCK_BYTES) for _ in range(RESERVE_BYTES // _BLOCK_BYTES)]
    del reserve
    return True
