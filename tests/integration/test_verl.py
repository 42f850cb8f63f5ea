"""A converted batch, in the hands of the real verl."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from infra.convert.verl import verl_batch
from tests.made_up_groups import made_up_groups
from trainer.advantages import outcome_advantages
from trainer.config import Estimator

ROOT = Path(__file__).parents[2]

VERL = (
    *("verl==0.9.1", "tensordict==0.15.3", "ray==2.60.0", "omegaconf==2.4.0", "hydra-core==1.3.8"),
    *("antlr4-python3-runtime==4.9.3", "codetiming==1.4.0", "pyvers==0.2.3", "orjson==3.13.0", "cloudpickle==3.1.3"),
    *("protobuf==7.36.2", "requests==2.34.2", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1"),
    *("referencing==0.37.0", "rpds-py==2026.9.1", "attrs==26.1.0"),
)
"""verl and what importing its DataProto and its estimators needs beside torch; all it depends on would be gigabytes."""

LIMIT_S = 540
"""For the installation, and for verl's work; importing it takes a minute on a busy machine."""


@pytest.fixture(scope="module")
def verl(tmp_path_factory):
    """Return a folder with verl: beside our packages, never among them."""
    folder = tmp_path_factory.mktemp("verl")
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", folder, "--no-deps", *VERL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"verl could not be installed: {done.stderr}"
    return folder


@pytest.mark.slow
@pytest.mark.integration
def test_verl_takes_a_converted_batch_and_its_advantages_are_ours(verl):
    """GRPO, Dr. GRPO and RLOO, group by group; cutting and joining the batch leaves it as it was."""
    side = [sys.executable, ROOT / "tests" / "integration" / "verl_side.py", verl]
    done = subprocess.run(
        side, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])

    groups = made_up_groups(count=6)
    ours = verl_batch(groups, pad_token_id=0)
    assert found["rows"] == len(ours.tensors["prompts"]) > 20
    assert found["keys"] == sorted(ours.tensors)
    assert found["temperature"] == 1.0
    assert set(found["cut_and_joined"].values()) == {True}
    assert found["prompts"] == [row[row != 0].tolist() for row in ours.tensors["prompts"]]
    for name, estimator, std in [
        ("grpo", Estimator.GRPO, True),
        ("dr_grpo", Estimator.GRPO, False),
        ("rloo", Estimator.RLOO, False),
    ]:
        by_group = (
            outcome_advantages([sample.outcome.reward for sample in group.graded], estimator, std=std)
            for group in groups
        )
        np.testing.assert_allclose(found["advantages"][name], list(chain.from_iterable(by_group)), atol=2e-6, rtol=2e-6)
