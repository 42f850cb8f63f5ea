"""Outcomes are data: what is truncated."""

from __future__ import annotations

from schemas.outcome import StopReason


def test_only_limits_on_the_policy_truncate():
    """An episode that ended by itself is not truncated."""
    assert {reason for reason in StopReason if reason.truncated} == {
        StopReason.TURNS,
        StopReason.TOKENS,
        StopReason.CONTEXT,
        StopReason.REPETITION,
    }
