"""What a directory of safetensors holds, from its headers alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from infra.inference.base import ModelPathMissing, PolicyRefused
from infra.inference.weight_files import INDEX_FILE, WEIGHTS_FILE, difference, shapes

TENSORS = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.float16)}


def test_names_and_shapes_are_those_of_the_file(tmp_path):
    """Metadata is no tensor."""
    save_file(TENSORS, tmp_path / WEIGHTS_FILE, metadata={"format": "pt"})
    assert shapes(tmp_path) == {"a": (2, 3), "b": ()}


def test_weights_in_several_files_are_one_model(tmp_path):
    """The index says which files; each must be there."""
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in TENSORS}}))
    assert shapes(tmp_path) == {"a": (2, 3), "b": ()}
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelPathMissing, match=r"no b\.safetensors in"):
        shapes(tmp_path)


@given(cut=st.integers(0, 200))
def test_a_file_that_is_not_whole_is_refused(tmp_path_factory, cut):
    """Wherever it ends too early."""
    folder = tmp_path_factory.mktemp("cut")
    save_file(TENSORS, folder / WEIGHTS_FILE)
    whole = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(whole[: min(cut, len(whole) - 1)])
    with pytest.raises(PolicyRefused, match="not a whole safetensors file"):
        shapes(folder)


@given(junk=st.binary(max_size=100))
def test_what_is_no_safetensors_is_refused(tmp_path_factory, junk):
    """And no length in it is believed."""
    folder = tmp_path_factory.mktemp("junk")
    (folder / WEIGHTS_FILE).write_bytes(junk)
    with pytest.raises(PolicyRefused, match="not a whole safetensors file"):
        shapes(folder)


def test_a_broken_index_is_refused(tmp_path):
    """It says which files there are."""
    (tmp_path / INDEX_FILE).write_text("{")
    with pytest.raises(PolicyRefused, match="not an index"):
        shapes(tmp_path)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a": (2, 3), "head": (9, 3)}, ""),
        ({"a": (2, 3), "head": (9, 3), "embed": (9, 3)}, ""),  # tied weights have one name or two
        ({"a": (2, 4), "head": (9, 3)}, "other shape: a (2, 4) for (2, 3)"),
        ({"a": (2, 3)}, "missing: head"),
        ({"a": (2, 3), "head": (9, 3), "lora": (8, 3)}, "unknown: lora"),
    ],
)
def test_weights_of_another_model_are_told_apart(given, says):
    """Names and shapes; which of them differ is said."""
    assert difference(given, {"a": (2, 3), "head": (9, 3)}) == says
