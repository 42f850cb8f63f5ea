"""A rollout as a person sees it."""

from __future__ import annotations

from rollmill.transcript_view import ending, visible
from schemas.messages import Trajectory
from schemas.outcome import Boundary, Expired, Failed, FailureKind
from tests.logs import make_task


def test_control_characters_are_shown_and_not_obeyed():
    """A policy says anything, also what would drive a terminal; line breaks and other scripts stay."""
    assert visible("a\x1b[2Jb\n\x0e\x7f ж") == "a\\x1b[2Jb\n\\x0e\\x7f ж"


def test_an_end_without_a_grade_says_what_failed_and_where():
    """A person reads words, not the form of an object."""
    failed = Failed(kind=FailureKind.ENGINE, boundary=Boundary.POLICY, cause="no answer")
    assert ending(Trajectory(task=make_task(), outcome=failed, stage="run")) == "failed (engine at policy): no answer"
    late = Trajectory(task=make_task(), outcome=Expired(cause="too late"), stage="reaper")
    assert ending(late) == "expired: too late"
