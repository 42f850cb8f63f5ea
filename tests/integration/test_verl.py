"""A converted batch, in the hands of the real verl."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from infra.convert.verl import verl_batch
from tests.foreign_packages import install, side
from tests.made_up_groups import made_up_groups
from trainer.advantages import outcome_advantages
from trainer.algorithm_config import Estimator

VERL = (
    *("verl==0.9.1", "tensordict==0.15.3", "ray==2.60.0", "omegaconf==2.4.0", "hydra-core==1.3.8"),
    *("antlr4-python3-runtime==4.9.3", "codetiming==1.4.0", "pyvers==0.2.3", "orjson==3.13.0", "cloudpickle==3.1.3"),
    *("protobuf==7.36.2", "requests==2.34.2", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1"),
    *("referencing==0.37.0", "rpds-py==2026.9.1", "attrs==26.1.0"),
)
"""verl and what importing its DataProto and its estimators needs beside torch; all it depends on would be gigabytes."""


@pytest.fixture(scope="module")
def verl(tmp_path_factory):
    """Return a folder with verl: beside our packages, never among them."""
    return install(tmp_path_factory.mktemp("verl"), *VERL, alone=True)


@pytest.mark.slow
@pytest.mark.integration
def test_verl_takes_a_converted_batch_and_its_advantages_are_ours(verl):
    """GRPO, Dr. GRPO and RLOO, group by group; cutting and joining the batch leaves it as it was."""
    found = side("verl_side.py", verl)

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
