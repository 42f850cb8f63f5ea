"""Which tasks can be read and not be run, and why."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.control import RunManifest
from schemas.identity import payload_digest
from schemas.messages import Budgets
from schemas.task_flaws import flaw, manifest_refusal, refusal
from schemas.transcript import Repetition, Sampling
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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"horizon": 99_999_999_999_999}, "horizon is 99999999999999; it is 1 to 2147483647"),
        ({"max_sampled_tokens": -1}, "max_sampled_tokens is -1; it is 1 to"),
        ({"horizon": "long"}, "Expected `int`, got `str`"),
        ({"seed": 2**64}, "no form on the wire"),
        ({"sampling": Sampling(temperature=math.inf)}, "sampling.temperature is inf; it is 0 to 1e+06"),
        ({"sampling": Sampling(temperature=1e-300)}, "sampling.temperature is 1e-300; it is 0, or at least 0.0001"),
        ({"payload_digest": "other"}, "payload_digest is 'other'"),
    ],
)
def test_a_producer_hears_what_readers_and_init_would_refuse(changes, says):
    """Decoding's rules and INIT's, in one answer."""
    assert says in refusal(make_task(**changes))
    assert refusal(make_task()) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"horizon": 99_999_999_999_999}, "horizon is 99999999999999; it is 1 to 2147483647"),
        ({"horizon": -1}, "horizon is -1"),
        ({"samples": 0}, "samples is 0"),
        ({"max_sampled_tokens": 0}, "max_sampled_tokens is 0"),
        ({"sampling": Sampling(temperature=math.nan)}, "sampling.temperature is nan"),
        ({"sampling": Sampling(max_tokens=-5)}, "sampling.max_tokens is -5"),
        ({"sampling": Sampling(stop_sequences=((),))}, "sampling.stop_sequences has (); it is 1 to 256 token ids"),
        ({"sampling": Sampling(stop_sequences=((3, -1),))}, "sampling.stop_sequences has (3, -1); "),
        (
            {"sampling": Sampling(stop_sequences=((1,),) * 65)},
            "stop_sequences has 65 entries; it has at most 64",
        ),
        (
            {"sampling": Sampling(repetition=Repetition(max_pattern_size=8, min_count=1))},
            "sampling.repetition.min_count is 1; it is 2 to 1024",
        ),
        (
            {"sampling": Sampling(repetition=Repetition(max_pattern_size=2, min_pattern_size=3))},
            "min_pattern_size is 3, and max_pattern_size 2: no pattern is both",
        ),
        ({"budgets": Budgets(run_s=math.nan)}, "budgets.run_s is nan"),
        ({"start_within_s": -1.0}, "start_within_s is -1.0"),
        ({"start_within_s": math.inf}, "start_within_s is inf"),
        ({"seed": 2**64}, "no form on the wire"),
        ({"horizon": None}, "Expected `int`, got `null`"),
    ],
)
def test_a_manifest_none_of_whose_tasks_could_run_is_refused(changes, says):
    """What all samples share is judged once, before it is written for good."""
    manifest = RunManifest(run="r", seed=1, samples=2)

    assert says in manifest_refusal(msgspec.structs.replace(manifest, **changes), now_ms=1_700_000_000_000)
    assert manifest_refusal(manifest, now_ms=1_700_000_000_000) is None
