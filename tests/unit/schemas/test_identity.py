"""Names and seeds are computed, so that the same task published twice is the same task."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.identity import (
    GROUP_ID_CHARS,
    SEED_BITS,
    canonical,
    group_id,
    payload_digest,
    run_name,
    sampling_seed,
    task_seed,
)
from tests.strategies import FREE_FORM, INT64

PAYLOADS = st.dictionaries(st.text(max_size=8), FREE_FORM, max_size=4)
PAYLOAD = {"b": [1, 2.0, None], "a": {"ü": True, "z": "x"}}
GOLDEN = {
    "digest": "92d39d1c8e264431e7ed9b3b31b82f26",
    "group": "hpuvn4nyagzcz2ov22s5",
    "task_seed": 5098217843361119519,
    "sampling_seed": 7094983014209879373,
}


def reordered(value):
    """Return an equal value whose maps were filled in the opposite order."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@given(payload=PAYLOADS)
def test_the_order_of_keys_does_not_matter(payload):
    """Two producers that fill a map in another order name the same task."""
    assert canonical(reordered(payload)) == canonical(payload)
    assert payload_digest(reordered(payload)) == payload_digest(payload)


@given(payload=PAYLOADS)
def test_canonical_bytes_lose_nothing(payload):
    """Different payloads cannot meet in one canonical form."""
    assert msgpack.unpackb(canonical(payload)) == payload


@given(payload=PAYLOADS)
def test_the_wire_does_not_change_a_payload(payload):
    """A stage that decodes a payload finds the digest that the producer wrote."""
    assert payload_digest(msgpack.unpackb(msgpack.packb(payload))) == payload_digest(payload)


def test_keys_are_ordered_by_their_utf8_bytes():
    """The order is the one of bytes, which every language has; UTF-16 units would put the key symbol first."""
    assert canonical({"🗝": 1, "\uffee": 2, "a": 3}).hex() == "83a16103a3efbfae02a4f09f979d01"


def test_canonical_integers_are_smallest_and_floats_are_doubles():
    """The two places where msgpack leaves a choice."""
    assert canonical([1, 200, -1, 1.0, 70_000]).hex() == "9501ccc8ffcb3ff0000000000000ce00011170"


def test_keys_that_are_no_text_are_refused():
    """Not every language has maps with other keys, so no id may depend on them."""
    with pytest.raises(TypeError, match="must be text"):
        canonical({"a": {1: 2}})


def test_golden_names():
    """These values are part of the contract: a change would publish every task of a run again."""
    assert payload_digest(PAYLOAD) == GOLDEN["digest"]
    assert group_id("run", "doors.jsonl", 0, 7, PAYLOAD) == GOLDEN["group"]
    assert task_seed(42, "doors.jsonl", 0, 7) == GOLDEN["task_seed"]
    assert sampling_seed(GOLDEN["task_seed"], 3, 2) == GOLDEN["sampling_seed"]


@given(run=st.text(), source=st.text(), visit=INT64, row=INT64, payload=PAYLOADS)
def test_a_group_id_is_short_lower_case_base32(run, source, visit, row, payload):
    """It can be part of a file name, a URL and a topic key."""
    group = group_id(run, source, visit, row, payload)
    assert len(group) == GROUP_ID_CHARS
    assert set(group) <= set("abcdefghijklmnopqrstuvwxyz234567")


def test_each_part_of_the_identity_counts():
    """Another run, source, visit, row or payload is another task."""
    ids = {
        group_id("r", "s", 0, 0, {}),
        group_id("R", "s", 0, 0, {}),
        group_id("r", "S", 0, 0, {}),
        group_id("r", "s", 1, 0, {}),
        group_id("r", "s", 0, 1, {}),
        group_id("r", "s", 0, 0, {"a": 1}),
        group_id("rs", "", 0, 0, {}),
    }
    assert len(ids) == 7


@given(seed=INT64, source=st.text(), number=INT64, other=INT64)
def test_seeds_fit_a_signed_64_bit_integer(seed, source, number, other):
    """Every language and every engine can hold them."""
    assert 0 <= task_seed(seed, source, number, other) < 1 << SEED_BITS
    assert 0 <= sampling_seed(seed, number, other) < 1 << SEED_BITS


def test_siblings_and_turns_draw_differently():
    """Samples of a group share the environment's seed and nothing else."""
    assert len({sampling_seed(7, sample, turn) for sample in range(8) for turn in range(16)}) == 128


@pytest.mark.parametrize("name", ["r", "R2.eval.3.v12", "_x", "a-b", "0", "x" * 100])
def test_a_run_has_a_name_that_keys_paths_and_commands_take(name):
    """Letters, digits, `.`, `_` and `-`."""
    assert name == run_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".x", "-x", "a/b", "a b", "a\n", "\x00", "é", "a\u202eb", "\udcff", "x" * 101, "x" * 10**6]
)
def test_another_name_is_refused_in_one_sentence(name):
    """It would be a path, an option, or nothing that can be typed; a long one is not repeated whole."""
    with pytest.raises(ValueError, match="is no name for a run: it begins with a letter, a digit or `_`") as refused:
        run_name(name)

    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()
