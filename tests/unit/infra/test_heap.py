"""The C heap of a service gives back what a batch needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

BATCHES = """
import gc, os
from infra.heap import hold_flat

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if {held}:
    assert hold_flat()
for size in (1, 2, 4, 8):  # each one freed raises glibc's own threshold to its size
    bytearray(size << 20)
before, small = resident(), []
for _ in range(16):
    batch = [bytearray(1 << 20) for _ in range(4)]
    small.append(bytearray(2048))  # lands behind the batch, where it outlives it
    del batch
print(resident() - before)
"""


def growth(*, held: bool) -> int:
    """Return by how much a process grows over some batches, bytes."""
    code = BATCHES.format(held=held)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the GNU C library's heap is looked at, by /proc")
def test_what_a_batch_needed_is_given_back_although_something_small_was_made_after_it():
    """Without the limit the buffers stay with the process."""
    assert growth(held=True) < 1 << 20 < growth(held=False)
