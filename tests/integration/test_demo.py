"""The demo as `make demo` runs it: a policy learns, processes are killed, the run is replayed, the books balance."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LIMIT_S = 1_500.0
"""Four to eight minutes on two cores; a machine that does much else takes longer."""


def demo(tmp_path, *options):
    """Return the figures of a demo."""
    argv = [sys.executable, "-m", "rollmill", "demo", "--json", *options, "--data", str(tmp_path / "demo")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_demo_learns_survives_its_kills_and_replays(kafka, tmp_path):
    """Success rises from the warm start's to far above it, on held-out hunts, whatever was killed on the way."""
    figures = demo(tmp_path, "--bootstrap", kafka)

    assert figures["conserved"]
    assert figures["replay"] == "10/10 digests equal"
    assert figures["success_after"] > figures["success_before"] + 0.3
    assert figures["kills"] == 2


def test_the_control_does_not_rise_and_is_as_sound_as_the_demo(tmp_path):
    """With rewards that siblings have traded there is nothing to learn; books and replay hold all the same."""
    figures = demo(tmp_path, "--bus", "memory", "--control", "shuffled")

    assert not figures["control"]["rose"]
    assert figures["steps"] > 0
    assert figures["conserved"]
    assert figures["replay_equal"]
