"""Outcomes are data: what is truncated, and what another attempt may mend."""

from __future__ import annotations

from schemas.outcome import FailureKind, StopReason


def test_only_limits_on_the_policy_truncate():
    """An episode that ended by itself is not truncated."""
    assert {reason for reason in StopReason if reason.truncated} == {
        StopReason.TURNS,
        StopReason.TOKENS,
        StopReason.CONTEXT,
    }


def test_what_would_fail_again_is_not_tried_again():
    """The family's own error and a task that cannot be run are final at once."""
    assert {kind for kind in FailureKind if not kind.retryable} == {FailureKind.HANDLER, FailureKind.INVALID_TASK}
