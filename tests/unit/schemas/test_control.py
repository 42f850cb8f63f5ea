"""Current state: one key per thing that has a state."""

from __future__ import annotations

import pytest

from schemas.control import control_key
from tests.golden.samples import SAMPLES


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("rollmill.run", "run/example"),
        ("rollmill.credit", "credit/example"),
        ("rollmill.cursor", "cursor/example"),
        ("rollmill.feeder_started", "feeder/example"),
        ("rollmill.policy_version", "policy/example"),
        ("rollmill.cancel", f"cancel/{SAMPLES['rollmill.cancel'].target}"),
        ("rollmill.breaker", "breaker/policy/http://127.0.0.1:8000/run/run-3"),
    ],
)
def test_each_kind_of_state_has_its_key(name, key):
    """A record replaces the one before it about the same thing, and no other."""
    assert control_key(SAMPLES[name]) == key
