"""An int8 export, made with the real torchao and loaded by transformers as it is."""

from __future__ import annotations

import pytest

from tests.foreign_packages import install, side


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Return a folder with torchao: beside our packages, for `peft` imports it wherever it finds it."""
    return install(tmp_path_factory.mktemp("torchao"), "torchao==0.18.0", alone=True)


@pytest.mark.slow
@pytest.mark.integration
def test_an_int8_folder_is_small_loads_as_it_is_and_says_what_it_is(packages, tmp_path):
    """It speaks like the version it was made from, on a CPU."""
    found = side("int8_side.py", packages, tmp_path)

    assert found["weight_bytes"] < 0.35 * found["whole_bytes"]
    assert found["int8_layers"] == 3 * 7
    assert found["kl"] < 1e-3 < found["spread"]
    assert found["new_tokens"] == 8
    assert found["digest"] is True
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(found["files"])
    assert found["left"] == ["model", "out"]
    assert "int8 here, each row with a scale" in found["card"]
    assert "SHA-256 of the version's weight file" in found["card"]
