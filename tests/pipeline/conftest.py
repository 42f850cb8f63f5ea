"""What most tests of the trainer begin with."""

from __future__ import annotations

import pytest
from synthetic_run import small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the directory of a small model."""
    directory = tmp_path_factory.mktemp("model") / "m"
    small_model(directory)
    return directory
