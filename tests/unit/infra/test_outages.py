"""How long stages stood still, from what each worker wrote."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from infra.outages import SILENT_MS, away_ms, forgettable
from schemas.control import Breaker, Outage


def breaker(*outages, service="policy", worker="run-1"):
    """Return what a worker wrote about (since, until) outages."""
    return Breaker(
        service=service,
        address="http://here",
        stage="run",
        worker=worker,
        open=False,
        since_ms=0,
        open_ms=0,
        outages=tuple(Outage(since_ms=since, until_ms=until) for since, until in outages),
        at_ms=0,
    )


def test_only_what_lies_between_the_two_moments_counts():
    """An outage before the task, or the part of one, delayed nobody."""
    said = [breaker((10, 20), (30, 50), (90, 120))]

    assert (40 - 30) + (100 - 90) + (50 - 40) == away_ms(said, 20, 100)
    assert [5, 0, 0] == [away_ms(said, 15, 30), away_ms(said, 20, 30), away_ms([], 0, 100)]


def test_what_several_workers_and_services_say_at_once_counts_once():
    """The service was away while any of them found so."""
    said = [breaker((10, 30)), breaker((20, 40), worker="run-2"), breaker((25, 35), service="envhost")]

    assert away_ms(said, 0, 100) == 30


TIMES = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)


@given(workers=st.lists(st.lists(TIMES, max_size=4), max_size=4), moments=TIMES)
def test_it_is_the_number_of_moments_at_which_anybody_found_a_service_away(workers, moments):
    """Counted one by one."""
    since, until = moments
    said = [breaker(*outages, worker=f"run-{number}") for number, outages in enumerate(workers)]
    away = {moment for outages in workers for begin, end in outages for moment in range(begin, end)} & set(
        range(since, until)
    )

    assert len(away) == away_ms(said, since, until)


NOW_MS = 10 * SILENT_MS


@given(
    workers=st.lists(st.tuples(st.lists(TIMES, max_size=3), st.integers(0, 3)), max_size=4),
    began=st.lists(st.integers(0, 60), max_size=4),
)
def test_what_is_forgotten_put_nothing_off_that_is_on_its_way(workers, began):
    """Whatever is open has the same time as before; what was said of late stays in any case."""
    said = [
        msgspec.structs.replace(breaker(*outages, worker=f"run-{number}"), at_ms=NOW_MS - days * SILENT_MS)
        for number, (outages, days) in enumerate(workers)
    ]
    gone = forgettable(said, min(began, default=NOW_MS), NOW_MS)
    left = [one for one in said if one not in gone]

    assert [away_ms(said, at, NOW_MS) for at in began] == [away_ms(left, at, NOW_MS) for at in began]
    assert all(one.at_ms < NOW_MS - SILENT_MS for one in gone)
    if not began:
        assert all(one.at_ms >= NOW_MS - SILENT_MS for one in left)
