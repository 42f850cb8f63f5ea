"""Whatever crosses a boundary is a Failure on the other side."""

from __future__ import annotations

import sys

import pytest

from infra.errors import Failure, boundary
from schemas.outcome import Boundary, FailureKind


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(4)], ids=["an error", "sys.exit"])
def test_what_a_handler_raises_is_its_failure_with_the_place(error):
    """Also a library that calls sys.exit: it ends the rollout, never the process."""
    with pytest.raises(Failure) as caught, boundary(Boundary.HANDLER_INIT, FailureKind.HANDLER):
        raise error

    assert (FailureKind.HANDLER, Boundary.HANDLER_INIT) == (caught.value.kind, caught.value.boundary)
    assert type(error).__name__ in caught.value.cause
    assert "test_errors.py" in caught.value.cause


def test_a_failure_passes_a_boundary_unchanged():
    """Its own boundary knows best."""
    failure = Failure(FailureKind.ENGINE, Boundary.POLICY, "no answer")
    with pytest.raises(Failure) as caught, boundary(Boundary.STAGE, FailureKind.HANDLER):
        raise failure

    assert caught.value is failure


def test_an_interrupt_is_nobodys_failure():
    """Ctrl-C ends the process."""
    with pytest.raises(KeyboardInterrupt), boundary(Boundary.STAGE, FailureKind.HANDLER):
        raise KeyboardInterrupt
    assert sys.exc_info() == (None, None, None)
