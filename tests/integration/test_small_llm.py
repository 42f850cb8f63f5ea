"""A model that others made, through the whole path: SmolLM2-135M trains on rollouts of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.small_llm import STEPS, SUCCESS
from benchmarks.smollm2 import ModelNotFetched, model

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LIMIT_S = 3_000.0
"""Four minutes on two idle cores."""

MOST_GIB = 8.0
"""Two models in float32, a version on its way between them, and caches."""


def test_smollm2_makes_optimizer_steps_on_rollouts_of_its_own():
    """Its success is where a group teaches something, trainer and engine agree, and the run replays."""
    try:
        model()
    except ModelNotFetched as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    argv = [sys.executable, "-m", "benchmarks.small_llm", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    figures = json.loads(done.stdout.splitlines()[-1])

    assert SUCCESS[0] <= figures["before"]["success"] <= SUCCESS[1]
    assert figures["steps"] == STEPS
    assert figures["optimizer_steps"] >= STEPS
    assert figures["mismatch"] < 1e-3
    assert figures["replayed"].startswith(f"{STEPS}/{STEPS} digests equal")
    assert figures["before"]["missing"] == figures["after"]["missing"] == 0
    assert figures["peak_gib"] < MOST_GIB
