"""Fetched records whose header names are not UTF-8."""

import pytest
from aiokafka.consumer import fetcher
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

import infra.kafka_consumer
from infra.kafka_headers import TolerantRecords


class BadName(str):
    """A header name that is no text, as only clients in other languages can write one."""

    __slots__ = ()

    def encode(self, *_):
        """Return what is no UTF-8."""
        return b"\xff\xfename"


GOOD, BAD = [("kind", b"a"), ("empty", None)], [("kind", b"a"), (BadName("x"), b"v")]

READ_AS = "\\xff\\xfename"
"""How the name is read."""


def fetched(*records, compression=0):
    """Return the bytes of a fetch: one batch with these headers, keys and values numbered."""
    builder = _DefaultRecordBatchBuilderPy(
        magic=2,
        compression_type=compression,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=100_000,
    )
    for offset, headers in enumerate(records):
        value = b"v%d" % offset
        assert builder.append(offset, 1000 + offset, b"k%d" % offset, value, headers=headers) is not None
    return bytes(builder.build())


def read(data):
    """Return (offset, timestamp, key, value, headers) of every record."""
    records, found = TolerantRecords(data), []
    while records.has_next():
        batch = records.next_batch()
        assert batch.validate_crc()
        found += [(r.offset, r.timestamp, bytes(r.key), bytes(r.value), list(r.headers)) for r in batch]
    return found


def as_read(offset, headers):
    """Return what one record must be read as."""
    names = [(READ_AS if isinstance(name, BadName) else name, value) for name, value in headers]
    return offset, 1000 + offset, b"k%d" % offset, b"v%d" % offset, names


@pytest.mark.parametrize("compression", [0, 1], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    "batch",
    [(GOOD,), (BAD,), (GOOD, BAD, GOOD), (BAD, GOOD, BAD), (GOOD, GOOD, GOOD, BAD), ([], BAD, [])],
    ids=["good", "bad", "between", "around", "last", "bare"],
)
def test_every_record_of_a_batch_is_read_once_in_order(batch, compression):
    """Those before such a record by the fast decoder, it and those behind it by the slow one."""
    assert read(fetched(*batch, compression=compression)) == [as_read(*one) for one in enumerate(batch)]


def test_the_next_batch_is_read_as_well():
    """A fetch brings several."""
    data = fetched(BAD) + fetched(GOOD)

    assert read(data) == [as_read(0, BAD), as_read(0, GOOD)]


def test_half_a_batch_at_the_end_of_a_fetch_waits_for_the_next_one():
    """The broker cuts where its limit lies."""
    whole = fetched(GOOD)
    records = TolerantRecords(whole + whole[:30])

    assert (records.size_in_bytes(), records.has_next()) == (len(whole) + 30, True)
    assert [record.offset for record in records.next_batch()] == [0]
    assert not records.has_next()
    assert records.next_batch() is None


def test_whoever_reads_from_kafka_reads_like_this():
    """The client offers no other place: a release that moves this one must not pass unseen."""
    assert infra.kafka_consumer
    assert fetcher.MemoryRecords is TolerantRecords
