"""The limits of a record's way fit into each other, and everybody takes them from one place."""

from __future__ import annotations

from infra.kafka_link import KafkaLimits
from schemas import limits
from schemas.topics import TABLE


def test_each_limit_leaves_room_for_what_the_next_step_adds():
    """A record that may be sent can be buried, and one that is sent is taken by the broker and fetched whole."""
    steps = [limits.INLINE_BYTES, limits.BURIED_BYTES, limits.RECORD_BYTES, limits.BATCH_BYTES]
    assert steps == sorted(set(steps))
    assert limits.COMPRESS_OVER < limits.INLINE_BYTES < limits.VALUE_BYTES
    assert limits.FETCH_BYTES >= limits.BATCH_BYTES
    # Kafka's framing of a batch with one record: 61 bytes, and at most 50 of lengths.
    assert limits.BATCH_BYTES - limits.RECORD_BYTES > 111


def test_topics_and_clients_have_the_same_limits():
    """One that was raised alone would move the refusal to a place that breaks more."""
    assert {limits.BATCH_BYTES} == {topic.max_bytes for topic in TABLE}
    assert (limits.RECORD_BYTES, limits.FETCH_BYTES) == (KafkaLimits().record_bytes, KafkaLimits().fetch_bytes)
