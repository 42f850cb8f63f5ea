"""The table of retries keeps its own rules."""

from __future__ import annotations

import typing

import pytest

from schemas.outcome import FailureKind
from schemas.retries import RETRIES, Delay, next_delay

EACH = pytest.mark.parametrize("kind", FailureKind)


def seconds(delay):
    return int(delay[:-1]) * {"s": 1, "m": 60}[delay[-1]]


def test_every_kind_of_failure_has_its_line():
    """A new kind is decided about, not forgotten."""
    assert set(RETRIES) == set(FailureKind)


def test_what_would_fail_again_is_not_tried_again():
    """The family's own error and a task that cannot be run are final at once."""
    assert {kind for kind, delays in RETRIES.items() if not delays} == {FailureKind.HANDLER, FailureKind.INVALID_TASK}


@EACH
def test_delays_are_tiers_and_never_become_shorter(kind):
    """What failed twice is given more time, not less."""
    assert set(RETRIES[kind]) <= set(typing.get_args(Delay))
    assert sorted(RETRIES[kind], key=seconds) == list(RETRIES[kind])


@EACH
def test_the_length_of_a_line_is_the_limit_of_its_kind(kind):
    """Attempts beyond it, also those that a foreign producer claims, have no next one."""
    delays = RETRIES[kind]

    assert delays == tuple(next_delay(kind, tried) for tried in range(len(delays)))
    assert next_delay(kind, len(delays)) is next_delay(kind, 2**31 - 1) is None
