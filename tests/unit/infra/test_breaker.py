"""A circuit breaker: when it opens, whom it lets through, how long it was open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.breaker import BreakerLimits, CircuitBreaker, State

LIMITS = BreakerLimits(failures=3, failing_s=2.0, first_pause_s=1.0, longest_pause_s=5.0, longest_s=60.0)


def opened(at=10.0, limits=LIMITS):
    """Return a breaker that opened at a time; its outage began two seconds before."""
    breaker = CircuitBreaker(limits)
    for now in (at - 2.0, at - 1.0, at):
        breaker.failed(now)
    return breaker


def test_it_opens_after_failures_in_a_row_over_a_while():
    """Both: enough calls, and enough time between the first and the last of them."""
    assert State.OPEN is opened().state


@pytest.mark.parametrize(
    "times", [(0.0, 5.0), (0.0, 0.0, 0.0, 0.1, 1.9)], ids=["too few", "all in the same two seconds"]
)
def test_a_few_failures_or_a_burst_of_them_open_nothing(times):
    """A restart of a moment, or one dropped connection under many calls, is no outage."""
    breaker = CircuitBreaker(LIMITS)
    for now in times:
        breaker.failed(now)

    assert State.CLOSED is breaker.state


def test_one_success_begins_the_row_anew():
    """A service that answers every third call is slow, not away."""
    breaker = CircuitBreaker(LIMITS)
    for now in range(100):
        breaker.succeeded() if now % 3 == 2 else breaker.failed(float(now))

    assert (State.CLOSED, 0.0) == (breaker.state, breaker.open_s(100.0))


def test_half_open_lets_one_probe_through():
    """Nobody before the pause is over, one then, and no second one before the first has ended."""
    breaker = opened(10.0)

    assert [False, True, False] == [breaker.probe(now) for now in (10.9, 11.0, 30.0)]
    assert State.HALF_OPEN is breaker.state


def test_a_probe_that_succeeds_closes_it_and_the_outage_ends():
    """It counts from the first call that failed."""
    breaker = opened(10.0)
    breaker.probe(11.0)
    breaker.probed(12.0, well=True)

    assert (State.CLOSED, 4.0, 4.0) == (breaker.state, breaker.open_s(12.0), breaker.open_s(99.0))


def test_after_an_outage_as_many_failures_are_needed_again():
    """The row begins anew."""
    breaker = opened(10.0)
    breaker.probe(11.0)
    breaker.probed(11.0, well=True)
    breaker.failed(20.0)
    breaker.failed(30.0)

    assert State.CLOSED is breaker.state


def test_pauses_between_probes_grow_to_a_bound():
    """A service that is away for hours is asked now and then, and found within seconds of its return."""
    breaker, pauses, now = opened(10.0), [], 10.0
    for _ in range(5):
        pauses.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker.probe(now)
        breaker.probed(now, well=False)

    assert [1.0, 2.0, 4.0, 5.0, 5.0] == pauses


def test_what_began_before_it_opened_says_nothing_afterwards():
    """A long answer may still come from an engine that takes no new calls; a late failure is no news."""
    breaker = opened(10.0)
    breaker.succeeded()
    breaker.failed(10.5)

    assert (State.OPEN, 11.0) == (breaker.state, breaker.probe_at)


def test_one_outage_counts_up_to_a_limit():
    """What waits longer than that spends its own time again; the next outage counts anew."""
    breaker = opened(10.0)
    breaker.probe(500.0)
    during = breaker.open_s(500.0)
    breaker.probed(500.0, well=True)
    for now in (600.0, 601.0, 602.0):
        breaker.failed(now)

    assert (60.0, 62.0) == (during, breaker.open_s(602.0))


class Model:
    """The rules again, from the whole history."""

    def __init__(self):
        self.row, self.open_since, self.past = [], None, 0.0
        self.probing, self.pause, self.probe_at = False, 0.0, 0.0

    def failed(self, now):
        if self.open_since is None:
            self.row.append(now)
            if len(self.row) >= LIMITS.failures and now - self.row[0] >= LIMITS.failing_s:
                self.open_since, self.pause = self.row[0], LIMITS.first_pause_s
                self.probe_at = now + self.pause

    def succeeded(self):
        if self.open_since is None:
            self.row = []

    def probe(self, now):
        due = self.open_since is not None and not self.probing and now >= self.probe_at
        self.probing = self.probing or due
        return due

    def probed(self, now, *, well):
        if not self.probing:
            return
        self.probing = False
        if well:
            self.past, self.open_since, self.row = self.open_s(now), None, []
        else:
            self.pause = min(2 * self.pause, LIMITS.longest_pause_s)
            self.probe_at = now + self.pause

    def open_s(self, now):
        return self.past + (0.0 if self.open_since is None else min(now - self.open_since, LIMITS.longest_s))


STEPS = st.lists(
    st.tuples(st.sampled_from(["failed"] * 4 + ["succeeded", "probe", "well", "ill"]), st.integers(0, 16)), max_size=60
)


@given(steps=STEPS)
def test_whatever_happens_it_keeps_its_rules(steps):
    """Any order of calls and probes: the state is the model's, the open time never shrinks nor outruns the clock."""
    breaker, model, now, before = CircuitBreaker(LIMITS), Model(), 0.0, 0.0
    for what, wait in steps:
        now += wait / 4
        match what:
            case "failed":
                breaker.failed(now)
                model.failed(now)
            case "succeeded":
                breaker.succeeded()
                model.succeeded()
            case "probe":
                assert breaker.probe(now) == model.probe(now)
            case _:
                breaker.probed(now, well=what == "well")
                model.probed(now, well=what == "well")
        assert (breaker.state is State.CLOSED) == (model.open_since is None)
        assert breaker.open_s(now) == pytest.approx(model.open_s(now))
        assert before <= breaker.open_s(now) <= now
        before = breaker.open_s(now)
