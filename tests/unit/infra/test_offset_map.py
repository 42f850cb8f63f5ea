"""The text beside a committed offset."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.bus import Committed
from infra.offset_map import MARK, MAX_STARTS, OffsetMap, decode, encode
from schemas.limits import METADATA_BYTES

BASES = st.integers(0, 2**40)


@st.composite
def maps(draw: st.DrawFn) -> tuple[int, OffsetMap]:
    """A base and what is known above it, the base being the lowest unfinished offset if there is one."""
    base = draw(BASES)
    gaps = draw(st.lists(st.integers(1, 5_000), max_size=100))
    starts = draw(st.lists(st.integers(0, MAX_STARTS), min_size=len(gaps) + 1, max_size=len(gaps) + 1))
    offsets = [base]
    for gap in gaps:
        offsets.append(offsets[-1] + gap)
    return base, OffsetMap(offsets[-1] + draw(st.integers(1, 100)), dict(zip(offsets, starts, strict=True)))


@given(maps())
def test_a_map_comes_back_as_it_was(made):
    """Which offsets are not done, and how often each was started, survive the log."""
    base, known = made

    assert known == decode(encode(base, known))


@given(BASES, st.integers(1, 6_000), st.integers(1, 5_000))
def test_a_map_that_does_not_fit_loses_its_end_and_nothing_else(base, count, gap):
    """What is left out is unknown, so it is done again; what is kept is right; the log's limit is never passed."""
    offsets = range(base, base + count * gap, gap)
    known = OffsetMap(offsets[-1] + 1, {at: at % (MAX_STARTS + 1) for at in offsets})
    committed = encode(base, known)
    kept = decode(committed)

    assert len(committed.metadata) <= METADATA_BYTES
    assert kept is not None
    assert kept.upper <= known.upper
    assert kept.unfinished == {at: starts for at, starts in known.unfinished.items() if at < kept.upper}


def test_a_full_window_of_a_busy_worker_fits_whole():
    """1,024 records in flight over 50,000 offsets, more than any worker is allowed, need no cut."""
    known = OffsetMap(50_000, {at * 48: 1 for at in range(1_024)})

    assert decode(encode(0, known)) == known


def test_nothing_above_the_offset_is_said_by_no_text():
    """A partition at rest keeps its commit plain."""
    assert encode(7, OffsetMap(7, {})) == Committed(7, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "p:17",
        "rm2:AAAA",
        MARK,
        MARK + "no base64!",
        MARK + "AAAA",
        MARK + base64.b64encode(b"\x80\x80\x80\x80\x80").decode(),
        "\N{SNOWMAN}",
    ],
)
def test_a_foreign_text_is_no_map(text):
    """A group that another program has used goes on from its offset."""
    assert decode(Committed(3, text)) is None


@given(maps(), st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_text_is_no_map(made, where, flip):
    """One wrong byte would call the wrong records done."""
    base, known = made
    raw = bytearray(base64.b64decode(encode(base, known).metadata[len(MARK) :]))
    raw[where % len(raw)] ^= flip

    assert decode(Committed(base, MARK + base64.b64encode(raw).decode())) is None


@given(maps(), st.integers(1, 1_000))
def test_a_map_belongs_to_its_offset(made, moved):
    """A tool that moves a group's offset and keeps the text does not make records disappear."""
    base, known = made

    assert decode(Committed(base + moved, encode(base, known).metadata)) is None


@given(st.binary(max_size=200), BASES)
def test_no_text_is_an_error(data, base):
    """Whatever lies there, reading it gives a map or none."""
    for text in (MARK + base64.b64encode(data).decode(), data.decode("latin-1")):
        found = decode(Committed(base, text))
        assert found is None or all(base <= offset < found.upper for offset in found.unfinished)
