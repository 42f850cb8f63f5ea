"""The directories of a run's versions: whole or not there, and no more of them than are kept."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from trainer.announce import ABANDONED_S, Announcer


@pytest.fixture
def announcer(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    return Announcer(
        None, None, run="r", model=model, directory=tmp_path / "versions", keep=2, known=(), next_version=3
    )


def names(tmp_path):
    return sorted(path.name.partition("-")[0] for path in (tmp_path / "versions").iterdir())


def test_a_version_is_a_whole_model_directory(announcer, tmp_path):
    """Weights, and what the model directory has beside them."""
    target, digest = announcer.write(1, b"weights")

    assert target.name == f"v000003-{digest[:12]}"
    assert {path.name for path in target.iterdir()} == {"model.safetensors", "tokenizer.json"}


def test_what_a_killed_trainer_left_is_removed_and_what_another_one_writes_is_not(announcer, tmp_path):
    """A whole model each: the disk would fill up; a trainer that was replaced may still be writing."""
    for name in (".v000001-old.aa", ".v000002-young.bb"):
        (tmp_path / "versions" / name).mkdir(parents=True)
    old = tmp_path / "versions" / ".v000001-old.aa"
    os.utime(old, (old.stat().st_mtime - ABANDONED_S - 1,) * 2)
    announcer.write(1, b"weights")

    assert names(tmp_path) == [".v000002", "v000003"]
