"""How large things may be on their way through the log: all limits together, since none can be changed alone.

    a message, uncompressed              VALUE_BYTES    more is refused by its writer, and unreadable to its readers
    over COMPRESS_OVER                                  its value is compressed
    a record with key and headers        INLINE_BYTES   over it the value goes to the blob store (a claim check)
    the same, buried in `dead`           BURIED_BYTES   over it headers or key are dropped, the value is cut
    whatever a client sends              RECORD_BYTES   over it the client refuses
    a batch at the broker                BATCH_BYTES    over it the broker refuses
    a fetch of one partition             FETCH_BYTES    over it a record still arrives, alone

Each line leaves room for what the next one adds: a dead letter's headers, then Kafka's own framing. The topic table,
the Kafka client, its twin in memory and the wire page take their numbers from here. Nothing else is known here.
"""

from __future__ import annotations

VALUE_BYTES = 16 * 1024 * 1024
"""Largest message, uncompressed, in bytes; and with it the largest blob, since what does not compress is kept plain."""

COMPRESS_OVER = 16 * 1024
"""A value larger than this many bytes is compressed, if that makes it smaller."""

INLINE_BYTES = 900_000
"""Largest record that holds its value itself, in bytes, key and headers included."""

BURIED_BYTES = 990_000
"""Largest record written to `dead`, in bytes, key and headers included: it has headers that the original had not."""

RECORD_BYTES = 1_000_000
"""Largest record that a client of ours sends, in bytes, key and headers included. Refused here already, since a refusal
by the broker breaks an idempotent producer."""

BATCH_BYTES = 1_048_576
"""Largest batch of records that the broker takes, in bytes (Kafka's `max.message.bytes`): a record and its framing."""

METADATA_BYTES = 4096
"""Longest text kept with a committed offset, in bytes (Kafka's default `offset.metadata.max.bytes`)."""

FETCH_BYTES = BATCH_BYTES
"""Most bytes of one partition in one fetch: the largest batch fits."""
