"""The real Weights & Biases, offline: one curve for each line of a run, whoever wrote it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LIMIT_S = 540
"""For the installation, and for three trainers' writing."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Return a folder with wandb and all that it needs: beside our packages, never among them."""
    folder = tmp_path_factory.mktemp("wandb")
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", folder, "wandb==0.31.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"wandb could not be installed: {done.stderr}"
    return folder


@pytest.mark.slow
@pytest.mark.integration
def test_steps_that_are_made_again_are_written_once_and_undone_ones_stay_apart(packages, tmp_path):
    """A resumed trainer goes on under the same id, one after a rollback under another; nothing is sent anywhere."""
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        "PYTHONPATH": str(ROOT),
        # Whoever asked for the network would fail.
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
    }
    side = [sys.executable, ROOT / "tests" / "integration" / "wandb_side.py", packages, tmp_path]
    done = subprocess.run(
        side, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]

    loss, success = ["trainer/loss", "trainer/step"], ["trainer/eval_success_mean", "trainer/step"]
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found["my-run"]) == sorted([[1, loss], [2, loss], [3, loss], [4, loss], [0, success], [2, success]])
    assert found["my-run.1"] == [[3, loss], [4, loss]]
