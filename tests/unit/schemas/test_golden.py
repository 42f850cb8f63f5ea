"""The bytes on the wire are a contract: what was written once is written and read the same way for ever."""

from __future__ import annotations

import pytest

from schemas.claim import ClaimCheck
from schemas.codec import decode, encode
from schemas.transcript import check
from tests.golden.samples import FOLDER, OLDER, OLDER_FOLDER, SAMPLES, TRANSCRIPT, golden_file
from tests.strategies import MESSAGE_TYPES

ON_THE_WIRE = (*MESSAGE_TYPES, ClaimCheck)
"""What a record may hold."""


@pytest.mark.parametrize("name", SAMPLES)
def test_the_encoder_writes_the_golden_bytes(name):
    """Other languages and older logs hold exactly these bytes (new types: `python -m tests.golden.make`)."""
    assert encode(SAMPLES[name]).hex() == golden_file(name).read_bytes().hex()


@pytest.mark.parametrize("name", SAMPLES)
def test_the_decoder_reads_the_golden_bytes(name):
    """What lies in a log can be read."""
    assert decode(golden_file(name).read_bytes(), *ON_THE_WIRE) == SAMPLES[name]


@pytest.mark.parametrize("name", OLDER)
def test_the_decoder_reads_what_older_writers_wrote(name):
    """A field that they did not know has its default."""
    assert decode((OLDER_FOLDER / f"{name}.msgpack").read_bytes(), *MESSAGE_TYPES) == OLDER[name]


def test_every_type_has_golden_bytes():
    """A new message type comes with a sample."""
    assert {type(message) for message in SAMPLES.values()} == set(ON_THE_WIRE)


def test_every_file_has_its_sample():
    """A renamed type leaves no orphan behind: old bytes stay readable or are removed on purpose."""
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(SAMPLES)
    assert sorted(path.stem for path in OLDER_FOLDER.iterdir()) == sorted(OLDER)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_named_by_their_type(name):
    """The file's name starts with the tag inside."""
    assert name.startswith(SAMPLES[name].wire_type())


def test_samples_show_every_field():
    """No field of a sample has its default, so the bytes of every field are pinned."""
    hidden = [
        f"{name}.{field}"
        for name, message in SAMPLES.items()
        for field, default in zip(
            type(message).__struct_fields__[::-1], type(message).__struct_defaults__[::-1], strict=False
        )
        if getattr(message, field) == default and name in {kind.wire_type() for kind in MESSAGE_TYPES}
    ]
    assert hidden == []


def test_the_sample_transcript_is_sound():
    """What the page of the wire contract shows keeps the invariants."""
    check(TRANSCRIPT)
