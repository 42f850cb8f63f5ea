r"""Records with header names that are not UTF-8: they are read like any other, instead of stopping who reads them.

Kafka's protocol says that a header's name is UTF-8, and its brokers do not check it. aiokafka raises at such a record,
inside the call that fetches, and again at every later call: one record would stop all members of every group behind it
for as long as it is kept. Here bytes that are no text are written out (`\xff`), and the record is its reader's to
judge. Such a name is not the same bytes any more once it is published again.

The client has no place to say so, so its class of fetched records is replaced, for the whole process. The fast decoder
stays; only a batch on which it stumbles is read again in Python. What records mean is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from aiokafka.consumer import fetcher
from aiokafka.record.default_records import DefaultRecordBatch, _DefaultRecordBatchPy
from aiokafka.record.memory_records import _MemoryRecordsPy


class TolerantRecords:
    """What one fetch brought of a partition, in place of aiokafka's `MemoryRecords`."""

    def __init__(self, data: bytes) -> None:
        self._records = _MemoryRecordsPy(data)

    def size_in_bytes(self) -> int:
        """Return how much was fetched."""
        size: int = self._records.size_in_bytes()
        return size

    def has_next(self) -> bool:
        """Tell whether there is another whole batch."""
        there: bool = self._records.has_next()
        return there

    def next_batch(self) -> Any:
        """Return the next batch; None if there is none."""
        data = self._records._next_slice  # noqa: SLF001 - the batch's own bytes: it does not tell them itself
        batch = self._records.next_batch()
        return TolerantBatch(batch, data) if isinstance(batch, DefaultRecordBatch) else batch


class TolerantBatch:
    """A batch whose records can all be read."""

    def __init__(self, batch: Any, data: memoryview) -> None:
        self._batch = batch
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        read = 0
        records = iter(self._batch)
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except UnicodeDecodeError:
                break
            read += 1
            yield record
        yield from islice(_read_slowly(self._data), read, None)


class _Tolerant(bytearray):
    """Bytes whose parts become text whatever they are."""

    def __getitem__(self, at: Any) -> Any:
        part = super().__getitem__(at)
        return _Tolerant(part) if isinstance(part, bytearray) else part

    def decode(self, encoding: str = "utf-8", errors: str = "backslashreplace") -> str:
        """Return the text; bytes that are none are written out."""
        return super().decode(encoding, errors)


def _read_slowly(data: memoryview) -> Iterator[Any]:
    batch = _DefaultRecordBatchPy(data)
    records: Iterator[Any] = iter(batch)  # it is unpacked by that
    batch._buffer = _Tolerant(batch._buffer)  # noqa: SLF001 - the names are decoded from slices of it
    return records


def read_any_header() -> None:
    """Let every consumer of this process read records with such headers."""
    fetcher.MemoryRecords = TolerantRecords
