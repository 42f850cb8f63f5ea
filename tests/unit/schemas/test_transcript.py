"""The token record: what holds for every good one, and that no single wrong field gets through."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.transcript import (
    Sampling,
    Transcript,
    TranscriptError,
    as_builtins,
    check,
    pack_logprobs,
    pack_tokens,
)
from tests.golden.samples import TRANSCRIPT
from tests.strategies import transcripts

EMPTY = Transcript(tokens=b"", mask=b"", logprobs=b"", spans=(), turns=())


def changed(transcript: Transcript, **fields) -> Transcript:
    """Return the transcript with some fields replaced."""
    return msgspec.structs.replace(transcript, **fields)


def with_item(items: tuple, index: int, **fields) -> tuple:
    """Return a tuple of structs with fields of one of them replaced."""
    return (*items[:index], msgspec.structs.replace(items[index], **fields), *items[index + 1 :])


def with_byte(data: bytes, index: int, value: int) -> bytes:
    """Return data with one byte replaced."""
    return data[:index] + bytes([value]) + data[index + 1 :]


@given(transcript=transcripts())
def test_sound_transcripts_pass(transcript):
    """Any number of turns, versions within a turn, segments, and an observation after the last answer."""
    check(transcript)


def test_an_empty_transcript_passes():
    """An episode that ended before its first turn has a record too."""
    check(EMPTY)


@given(transcript=transcripts(), short=st.sampled_from(["tokens", "mask", "logprobs"]), cut=st.integers(1, 4))
def test_a_lost_entry_is_caught(transcript, short, cut):
    """The three arrays have one entry per token, and no entry is cut in half."""
    assume(len(getattr(transcript, short)) >= cut)
    with pytest.raises(TranscriptError, match="differ in length"):
        check(changed(transcript, **{short: getattr(transcript, short)[:-cut]}))


@given(transcript=transcripts(), data=st.data())
def test_a_changed_mask_is_caught(transcript, data):
    """A token is sampled or it is not: spans and turns both say which."""
    assume(transcript.mask)
    index = data.draw(st.integers(0, len(transcript.mask) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != transcript.mask[index]))
    with pytest.raises(TranscriptError):
        check(changed(transcript, mask=with_byte(transcript.mask, index, value)))


@given(transcript=transcripts(), data=st.data())
def test_a_logprob_of_a_token_that_was_not_sampled_is_caught(transcript, data):
    """At mask 0 the log-prob is exactly 0.0, whatever the engine said."""
    unsampled = [index for index, sampled in enumerate(transcript.mask) if not sampled]
    assume(unsampled)
    values = transcript.logprob_array.copy()
    values[data.draw(st.sampled_from(unsampled))] = data.draw(st.floats(-20.0, -(2.0**-20), width=32))
    with pytest.raises(TranscriptError, match="not sampled has a log-prob"):
        check(changed(transcript, logprobs=pack_logprobs(values)))


@given(transcript=transcripts(), data=st.data(), value=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_logprob_that_is_no_number_is_caught(transcript, data, value):
    """One infinity would make the whole batch's loss one."""
    assume(transcript.mask)
    values = transcript.logprob_array.copy()
    values[data.draw(st.integers(0, len(values) - 1))] = value
    with pytest.raises(TranscriptError, match="not a finite number"):
        check(changed(transcript, logprobs=pack_logprobs(values)))


@given(transcript=transcripts(), data=st.data())
def test_a_negative_token_is_caught(transcript, data):
    """Ids index an embedding: a negative one would quietly take another row."""
    assume(transcript.mask)
    ids = transcript.token_ids.copy()
    ids[data.draw(st.integers(0, len(ids) - 1))] = data.draw(st.integers(-(2**31), -1))
    with pytest.raises(TranscriptError, match="negative"):
        check(changed(transcript, tokens=pack_tokens(ids)))


@given(transcript=transcripts(), data=st.data(), field=st.sampled_from(["start", "stop"]))
def test_a_moved_span_is_caught(transcript, data, field):
    """The spans cover the sampled tokens, no more and no less, whichever edge moves."""
    assume(transcript.spans)
    index = data.draw(st.integers(0, len(transcript.spans) - 1))
    old = getattr(transcript.spans[index], field)
    new = data.draw(st.integers(-3, len(transcript.mask) + 3).filter(lambda value: value != old))
    with pytest.raises(TranscriptError):
        check(changed(transcript, spans=with_item(transcript.spans, index, **{field: new})))


@given(transcript=transcripts(), data=st.data())
def test_a_lost_or_repeated_span_is_caught(transcript, data):
    """Each sampled token has one version and one set of parameters."""
    assume(transcript.spans)
    index = data.draw(st.integers(0, len(transcript.spans) - 1))
    times = data.draw(st.sampled_from([0, 2]))
    spans = (*transcript.spans[:index], *transcript.spans[index : index + 1] * times, *transcript.spans[index + 1 :])
    with pytest.raises(TranscriptError):
        check(changed(transcript, spans=spans))


@given(transcript=transcripts(), data=st.data(), field=st.sampled_from(["start", "sampled", "stop"]))
def test_a_moved_turn_is_caught(transcript, data, field):
    """Turns follow each other without a gap, and each splits into a prompt and what was sampled."""
    assume(transcript.turns)
    index = data.draw(st.integers(0, len(transcript.turns) - 1))
    old = getattr(transcript.turns[index], field)
    new = data.draw(st.integers(-3, len(transcript.mask) + 3).filter(lambda value: value != old))
    with pytest.raises(TranscriptError):
        check(changed(transcript, turns=with_item(transcript.turns, index, **{field: new})))


@given(transcript=transcripts(), data=st.data())
def test_a_lost_turn_is_caught(transcript, data):
    """Every sampled token belongs to a turn, and every later turn starts where the one before ended."""
    assume(any(transcript.mask))
    answered = [number for number, turn in enumerate(transcript.turns) if turn.stop > turn.sampled]
    index = data.draw(st.sampled_from(answered))
    with pytest.raises(TranscriptError):
        check(changed(transcript, turns=(*transcript.turns[:index], *transcript.turns[index + 1 :])))


@given(transcript=transcripts(), data=st.data())
def test_a_segment_that_starts_within_a_turn_is_caught(transcript, data):
    """A new token prefix can only begin where a prompt begins."""
    starts = {0, *(turn.start for turn in transcript.turns)}
    wrong = data.draw(st.integers(-3, len(transcript.mask) + 3).filter(lambda value: value not in starts))
    with pytest.raises(TranscriptError, match="segments"):
        check(changed(transcript, segments=tuple(sorted({*transcript.segments, wrong}))))


@pytest.mark.parametrize("segments", [(), (6,), (6, 0), (0, 0), (0, 6, 6)])
def test_segments_rise_from_zero(segments):
    """The first segment starts with the first token; none is named twice."""
    with pytest.raises(TranscriptError, match="must rise from 0"):
        check(changed(TRANSCRIPT, segments=segments))


@given(transcript=transcripts())
def test_arrays_are_views_of_the_bytes(transcript):
    """Packing what the views show gives the same bytes, and the views cannot be written."""
    assert pack_tokens(transcript.token_ids) == transcript.tokens
    assert pack_logprobs(transcript.logprob_array) == transcript.logprobs
    assert transcript.mask_array.tobytes() == transcript.mask
    assert not transcript.token_ids.flags.writeable
    assert transcript.sampled_count == sum(span.stop - span.start for span in transcript.spans)


def test_arrays_are_little_endian():
    """The bytes mean the same on every machine."""
    assert pack_tokens([1, 256]) == bytes([1, 0, 0, 0, 0, 1, 0, 0])
    assert pack_logprobs([-0.5]) == bytes([0, 0, 0, 0xBF])


def test_a_transcript_can_be_shown_as_plain_lists():
    """`show` prints numbers, not bytes."""
    shown = as_builtins(TRANSCRIPT)
    assert shown["tokens"] == [1, 70_000, 9, 5, 6, 2, 8, 7, 2]
    assert shown["mask"] == [0, 0, 0, 1, 1, 1, 0, 1, 1]
    assert shown["logprobs"][4] == -1.25
    assert shown["turns"][1]["action"] == "no action in the text"


@pytest.mark.parametrize("value", [0.5, 30.0, float("inf"), float("nan")])
def test_a_logprob_that_is_none_is_caught(value):
    """No probability is above 1, and whoever trains on NaN has no weights left."""
    logprobs = TRANSCRIPT.logprob_array.copy()
    logprobs[3] = value
    with pytest.raises(TranscriptError, match="a log-prob is"):
        check(changed(TRANSCRIPT, logprobs=pack_logprobs(logprobs)))


def test_a_logprob_that_an_engine_rounded_up_passes():
    """The logarithm of a sum in 16 bits may come out a little above 0."""
    logprobs = TRANSCRIPT.logprob_array.copy()
    logprobs[3] = 0.002
    check(changed(TRANSCRIPT, logprobs=pack_logprobs(logprobs)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": -1}, "names version -1"),
        ({"version": 2**63}, "names version"),
        ({"sampling": Sampling(temperature=float("nan"))}, "sampling.temperature is nan"),
        ({"sampling": Sampling(top_p=0.0)}, "sampling.top_p is 0.0"),
    ],
)
def test_a_span_that_nothing_can_have_sampled_is_caught(fields, says):
    """By weights that have no number, or from a distribution that is none."""
    with pytest.raises(TranscriptError, match=says):
        check(changed(TRANSCRIPT, spans=with_item(TRANSCRIPT.spans, 0, **fields)))
