"""The real Weights & Biases, offline: one curve for each line of a run, whoever wrote it."""

from __future__ import annotations

import os

import pytest

from tests.foreign_packages import install, side


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Return a folder with wandb and all that it needs: beside our packages, never among them."""
    return install(tmp_path_factory.mktemp("wandb"), "wandb==0.31.0")


@pytest.mark.slow
@pytest.mark.integration
def test_steps_that_are_made_again_are_written_once_and_undone_ones_stay_apart(packages, tmp_path):
    """A resumed trainer goes on under the same id, one after a rollback under another; nothing is sent anywhere."""
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        # Whoever asked for the network would fail.
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
    }
    found = side("wandb_side.py", packages, tmp_path, cwd=tmp_path, environment=environment)

    loss, success = ["trainer/loss", "trainer/step"], ["trainer/eval_success_mean", "trainer/step"]
    assert sorted(found["my-run"]) == sorted([[1, loss], [2, loss], [3, loss], [4, loss], [0, success], [2, success]])
    assert found["my-run.1"] == [[3, loss], [4, loss]]
