"""Partitions are computed the way Kafka's own clients compute them."""

from __future__ import annotations

import pytest
from aiokafka.partitioner import murmur2 as reference
from hypothesis import given
from hypothesis import strategies as st

from schemas.partition import murmur2, partition_for


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_the_vectors_of_kafkas_own_tests(key, expected):
    """Apache Kafka's UtilsTest.testMurmur2, whose Java integers are signed."""
    assert murmur2(key) == expected % 2**32


@given(data=st.binary(max_size=64))
def test_murmur2_agrees_with_the_kafka_client(data):
    """A record that we place and one that a client places by key meet in one partition."""
    assert murmur2(data) == reference(data) % 2**32


@given(key=st.text(), partitions=st.integers(1, 64))
def test_a_partition_lies_on_the_topic(key, partitions):
    """The sign bit is dropped, not taken as a minus."""
    assert partition_for(key, partitions) == (reference(key.encode()) & 0x7FFFFFFF) % partitions
    assert 0 <= partition_for(key, partitions) < partitions


def test_runs_spread():
    """Eight partitions are all used by a handful of runs."""
    assert {partition_for(f"run-{number}", 8) for number in range(64)} == set(range(8))
