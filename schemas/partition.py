"""Which partition a key belongs to, computed here so that every client agrees.

murmur2 as Kafka's default partitioner computes it (org.apache.kafka.common.utils.Utils, Apache Kafka): a record
placed by us and one placed by a Java producer with the same key meet in the same partition.
"""

from __future__ import annotations

import struct
from functools import lru_cache

# Kafka's seed, and the constants of murmur2 (Austin Appleby).
_SEED = 0x9747B28C
_M = 0x5BD1E995
_R = 24
_U32 = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Return the 32-bit murmur2 hash of data as Kafka computes it."""
    length = len(data)
    h = (_SEED ^ length) & _U32
    words = length // 4
    for word in struct.unpack_from(f"<{words}I", data):
        k = (word * _M) & _U32
        k = ((k ^ k >> _R) * _M) & _U32
        h = ((h * _M) & _U32) ^ k
    tail = data[words * 4 :]
    if tail:
        h ^= int.from_bytes(tail, "little")
        h = (h * _M) & _U32
    h ^= h >> 13
    h = (h * _M) & _U32
    return h ^ (h >> 15)


@lru_cache(maxsize=256)  # a sample's events and a run's records ask for the same key again and again
def partition_for(key: str, partitions: int) -> int:
    """Return the partition of a key, in [0, partitions)."""
    return (murmur2(key.encode()) & 0x7FFFFFFF) % partitions
