"""Which tasks can be read and not be run, and why."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.identity import payload_digest
from schemas.task_flaws import flaw
from schemas.transcript import Sampling
from tests.logs import make_task
from tests.strategies import FREE_FORM


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("max_tokens", 0),
    ],
)
def test_sampling_parameters_out_of_range_are_named(field, value):
    """With what they may be."""
    wrong = flaw(make_task(sampling=msgspec.structs.replace(Sampling(), **{field: value})))

    assert wrong.startswith(f"sampling.{field} is {value}; it is ")


def test_the_ends_of_the_ranges_are_in_them():
    """Greedy sampling and filters that are off are what most tasks want."""
    assert flaw(make_task(sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=1))) is None


def test_a_digest_of_another_payload_is_a_flaw():
    """The arbiter would take two tasks for one, or one for two."""
    wrong = flaw(make_task(payload_digest=payload_digest({"size": 6})))

    assert payload_digest(make_task().payload) in wrong


def test_a_payload_without_a_canonical_form_is_a_flaw():
    """Nobody can name its digest."""
    task = msgspec.structs.replace(make_task(), payload={"a": {1: 2}})

    assert "map keys must be text" in flaw(task)


@given(payload=st.dictionaries(st.text(max_size=8), FREE_FORM, max_size=3))
def test_any_payload_will_do_with_its_own_digest(payload):
    """What a family wants of it is the family's business."""
    assert flaw(make_task(payload=payload)) is None
