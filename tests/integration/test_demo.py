"""The demo as `make demo` runs it: a policy learns, processes are killed, the run is replayed, the books balance."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LIMIT_S = 1_500.0
"""Four to eight minutes on two cores; a machine that does much else takes longer."""


def test_the_demo_learns_survives_its_kills_and_replays(kafka, tmp_path):
    """Success rises from the warm start's to far above it, on held-out hunts, whatever was killed on the way."""
    argv = [sys.executable, "-m", "rollmill", "demo", "--json", "--bootstrap", kafka, "--data", str(tmp_path / "demo")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    figures = json.loads(done.stdout.splitlines()[-1])

    assert figures["conserved"]
    assert figures["replay"] == "10/10 digests equal"
    assert figures["success_after"] > figures["success_before"] + 0.3
    assert figures["kills"] == 2
