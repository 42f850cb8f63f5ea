"""The codec is compared on what it has to carry."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import codec
from schemas import transcript

ARRAYS = codec.made()


def test_both_sides_give_back_what_went_in():
    """To the bit: the rival's 64-bit floats hold ours exactly."""
    trajectory = codec.trajectory_of(ARRAYS)
    for found in (
        codec.ours_to_arrays(codec.ours_to_bytes(trajectory)),
        codec.rival_to_arrays(codec.rival_to_bytes(ARRAYS)),
    ):
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(found, ARRAYS, strict=True))


def test_the_trajectory_is_one_that_the_product_accepts():
    """With a version and a turn for each of its parts."""
    found = codec.trajectory_of(ARRAYS).transcript
    transcript.check(found)

    assert len(found.turns) == codec.TOKENS // codec.TURN
    assert ARRAYS.mask.mean() == pytest.approx(0.5)
