"""What the board says of samples and stages, whatever order their events come in."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.board.board import MAX_STAGES, NAME_CHARS, Board
from infra.board.sample import MAX_MARKS, PIPELINE
from infra.board.sample import MAX_STAGES as MAX_STAGES_OF_ONE
from schemas.telemetry import EventKind, StageEvent
from schemas.topics import SHORT_MS

NOW_MS = 1_700_000_000_000
STARTED, FINISHED, RETRIED = EventKind.STARTED, EventKind.FINISHED, EventKind.RETRIED
FAILED, EXPIRED, CANCELLED, WAITING = EventKind.FAILED, EventKind.EXPIRED, EventKind.CANCELLED, EventKind.WAITING


def board_of(*events, worker="run-1", **options):
    board = Board(**options)
    for event in events:
        board.take(event, worker, NOW_MS)
    return board


def stage(board, name, now_ms=NOW_MS):
    return next(view for view in board.view(now_ms).stages if view.stage == name)


def in_flight(board):
    return {view.stage: view.in_flight for view in board.view(NOW_MS).stages if view.in_flight}


class TestInFlight:
    """Which stage has a sample."""

    def test_what_was_started_and_has_not_ended_is_in_flight(self, event):
        """From its start, by the worker that took it."""
        board = board_of(event(STARTED, -60), event(STARTED, -9, sample=1), event(FINISHED, -1, sample=1))
        oldest = stage(board, "run").oldest

        assert {"run": 1} == in_flight(board)
        assert ("r", "g", 0, 60.0, "run-1") == (
            oldest.run,
            oldest.group,
            oldest.sample,
            oldest.age_s,
            oldest.worker,
        )

    def test_the_oldest_is_the_one_that_was_taken_first(self, event):
        """By its start, not by when that became known."""
        board = board_of(event(STARTED, -10), event(STARTED, -50, sample=1), event(STARTED, -30, sample=2))

        assert stage(board, "run").oldest.sample == 1

    def test_a_sample_that_is_started_again_is_in_flight_once_from_its_last_start(self, event):
        """A killed worker leaves it open until another one takes it."""
        board = board_of(event(STARTED, -50))
        board.take(event(STARTED, -10), "run-2", NOW_MS)

        assert {"run": 1} == in_flight(board)
        assert (10.0, "run-2") == (stage(board, "run").oldest.age_s, stage(board, "run").oldest.worker)

    def test_a_late_end_of_the_first_worker_does_not_end_what_the_second_one_began_after_it(self, event):
        """Both work on it for a while after a rebalance."""
        board = board_of(event(STARTED, -50), event(STARTED, -10), event(FINISHED, -20))

        assert {"run": 1} == in_flight(board)

    def test_a_start_that_becomes_known_after_its_end_is_not_in_flight(self, event):
        """A worker says it late when the log was away from it."""
        board = board_of(event(FINISHED, -1), event(STARTED, -2))

        assert {} == in_flight(board)

    @pytest.mark.parametrize(("kind", "expected"), [(FINISHED, {}), (STARTED, {"eval": 1})])
    def test_what_a_later_stage_has_is_no_longer_in_an_earlier_one(self, event, kind, expected):
        """The worker was killed between its output and its last word."""
        board = board_of(event(STARTED, -50), event(kind, -40, stage="eval"))

        assert expected == in_flight(board)

    def test_another_attempt_ends_the_one_before_it_everywhere(self, event):
        """The retry was published; whoever could not say so was killed."""
        board = board_of(event(STARTED, -50), event(STARTED, -40, stage="init", attempt=1))

        assert {"init": 1} == in_flight(board)

    @pytest.mark.parametrize("kind", [FAILED, EXPIRED, CANCELLED])
    def test_an_end_of_the_sample_anywhere_ends_it_everywhere(self, event, kind):
        """Also by a service that is no stage, and that does not know the attempt."""
        board = board_of(event(STARTED, -50, attempt=1), event(kind, -40, stage="reaper", attempt=0))

        assert {} == in_flight(board)
        assert {kind.value: 1} == board.view(NOW_MS).states

    def test_work_that_begins_after_the_end_of_its_sample_is_shown(self, event):
        """A record that was handed out again: a worker has it, whatever it is good for."""
        board = board_of(event(FINISHED, -40, stage="eval"), event(STARTED, -10))

        assert {"run": 1} == in_flight(board)

    def test_a_clock_that_is_ahead_keeps_nobody_in_the_future(self, event):
        """What is started in the future could else never end."""
        board = board_of(event(STARTED, 1_000_000), event(FINISHED, -0.001))
        assert {"run": 1} == in_flight(board)
        board.take(event(FINISHED, 1), "run-1", NOW_MS + 5_000)

        assert {} == in_flight(board)
        assert stage(board_of(event(STARTED, 60)), "run").oldest.age_s == 0.0


class TestWaits:
    """What the oldest work waits for."""

    def test_what_its_worker_said_last(self, event):
        """Of its present start."""
        board = board_of(
            event(STARTED, -50),
            event(WAITING, -40, detail="policy version >= 2"),
            event(WAITING, -30, detail="policy version >= 3"),
        )

        assert stage(board, "run").oldest.waits_for == "policy version >= 3"

    def test_what_is_usual_in_the_stage_when_nobody_says_it_better(self, event):
        """Nothing said, no longer waiting, or said by a worker that is gone."""
        said = event(WAITING, -40, detail="policy version >= 2")
        silent = board_of(event(STARTED, -50))
        over = board_of(event(STARTED, -50), said, event(WAITING, -39))
        gone = board_of(event(STARTED, -50), said, event(STARTED, -10))

        assert {PIPELINE["run"]} == {stage(board, "run").oldest.waits_for for board in (silent, over, gone)}

    def test_a_wait_is_neither_an_end_nor_counted(self, event):
        """It happens inside the stage."""
        board = board_of(event(STARTED, -50), event(WAITING, -40, detail="x"))

        assert {"run": 1} == in_flight(board)
        assert {"started": 1} == stage(board, "run").counts["1h"]


class TestStates:
    """What samples are about, all together and one by one."""

    def test_each_sample_has_one_state(self, event):
        """Wherever it is."""
        board = board_of(
            event(STARTED, -50, sample=0),
            event(STARTED, -50, sample=1),
            event(FINISHED, -40, sample=1),
            event(STARTED, -50, sample=2),
            event(RETRIED, -40, sample=2),
            event(FINISHED, -30, sample=3, stage="eval"),
            event(FAILED, -30, sample=4),
            event(WAITING, -30, sample=5, detail="x"),
            event(STARTED, -30, sample=6),
            event(EventKind.DEAD, -20, sample=6),
        )

        assert {
            "working": 1,
            "queued": 1,
            "retrying": 1,
            "done": 1,
            "failed": 1,
            "dead": 1,
            "unknown": 1,
        } == board.view(NOW_MS).states

    def test_the_first_end_of_a_sample_is_its_end(self, event):
        """As in the log."""
        board = board_of(event(EXPIRED, -1, stage="reaper"), event(FINISHED, -5, stage="eval"))

        assert {"done": 1} == board.view(NOW_MS).states

    def test_one_sample_is_shown_with_its_way(self, event):
        """Where it is, and how it left each stage before."""
        board = board_of(
            event(STARTED, -50, stage="init"),
            event(FINISHED, -45, stage="init"),
            event(STARTED, -40),
            event(RETRIED, -30, detail="host lost"),
            event(STARTED, -20, stage="init", attempt=1),
            event(FINISHED, -10, stage="init", attempt=1),
        )
        found = board.sample("r", "g", 0, NOW_MS)

        assert ("queued", "run", None) == (found.state, found.stage, found.in_flight)
        assert [("init", 1, "finished", ""), ("run", 0, "retried", "host lost")] == [
            (stay.stage, stay.attempt, stay.ended, stay.detail) for stay in found.stays
        ]
        assert board.sample("r", "g", 1, NOW_MS) is None

    def test_a_sample_in_flight_says_what_it_waits_for(self, event):
        """As in the whole view."""
        found = board_of(event(STARTED, -3), event(WAITING, -2, detail="a place")).sample("r", "g", 0, NOW_MS)

        assert ("working", "run", "a place", 3.0) == (
            found.state,
            found.stage,
            found.in_flight.waits_for,
            found.in_flight.age_s,
        )


class TestCounts:
    """How many of each kind happened lately."""

    def test_each_stage_counts_its_own_in_each_window(self, event):
        """By when it happened."""
        board = board_of(
            *(event(FINISHED, -10 * sample, sample=sample) for sample in range(10)),
            event(RETRIED, -200, sample=20),
            event(FINISHED, -3_000, stage="eval"),
            event(FINISHED, -4_000, stage="eval", sample=1),
        )

        assert {"1m": {"finished": 7}, "5m": {"finished": 10, "retried": 1}} == {
            name: counts for name, counts in stage(board, "run").counts.items() if name != "1h"
        }
        assert {"1m": {}, "5m": {}, "1h": {"finished": 1}} == stage(board, "eval").counts
        assert {"1m": {}, "5m": {}, "1h": {}} == stage(board, "init").counts

    def test_a_copy_of_an_event_counts_once(self, event):
        """A record may lie in the log twice, with all that is in it."""
        copied = [event(STARTED, -9), event(RETRIED, -8), event(STARTED, -7, attempt=1), event(FINISHED, -6, attempt=1)]

        assert {"started": 2, "retried": 1, "finished": 1} == stage(board_of(*copied, *copied), "run").counts["1h"]

    def test_a_record_that_names_no_sample_is_counted_and_is_none(self, event):
        """It could not be read."""
        board = board_of(event(EventKind.DEAD, -9, run="", group=""))

        assert ({"dead": 1}, {}) == (stage(board, "run").counts["5m"], board.view(NOW_MS).states)


class TestBounds:
    """Memory stays within its limits, whatever the log holds."""

    def test_the_longest_untouched_that_no_stage_has_goes_first(self, event):
        """And nobody misses it."""
        board = board_of(
            event(STARTED, -9),
            event(FINISHED, -8, sample=1),
            event(FINISHED, -7, sample=2),
            event(FINISHED, -6, sample=3),
            max_samples=3,
        )

        assert board.sample("r", "g", 1, NOW_MS) is None
        assert {"working": 1, "queued": 2} == board.view(NOW_MS).states
        assert board.forgotten == 0

    def test_work_in_flight_that_is_forgotten_is_counted(self, event):
        """The view is then not all there is."""
        board = board_of(*(event(STARTED, -9, sample=sample) for sample in range(5)), max_samples=3)

        assert {"run": 3} == in_flight(board)
        assert (2, {"working": 3}) == (board.view(NOW_MS).forgotten, board.view(NOW_MS).states)

    def test_work_that_is_older_than_the_log_is_forgotten(self, event):
        """Nobody will ever say what became of it."""
        board = board_of(event(STARTED, -9))
        later = board.view(NOW_MS + SHORT_MS)

        assert ([0, 0, 0], {}, 1) == ([view.in_flight for view in later.stages], later.states, later.forgotten)

    def test_names_too_long_and_stages_too_many_are_refused_and_counted(self, event):
        """Anybody may write to the topic."""
        long = "x" * (NAME_CHARS + 1)
        board = board_of(
            *(event(STARTED, -9, **{name: long}) for name in ("run", "group", "stage")),
            *(event(STARTED, -9, stage=f"s{number}", group=f"g{number}") for number in range(MAX_STAGES)),
        )
        view = board.view(NOW_MS)

        assert (MAX_STAGES, 3 + len(PIPELINE)) == (len(view.stages), view.refused)

    def test_texts_and_stages_of_one_sample_are_cut(self, event):
        """A cause may be as long as a record."""
        board = board_of(
            event(STARTED, -9), event(FAILED, -8, detail="x" * 100_000), worker="w" * 100_000, max_samples=9
        )
        for number in range(MAX_STAGES_OF_ONE + 3):
            board.take(event(STARTED, -7, stage=f"s{number}"), "w", NOW_MS)
        found = board.sample("r", "g", 0, NOW_MS)

        assert len(found.stays) == MAX_STAGES_OF_ONE
        assert max(len(stay.detail) for stay in found.stays) <= 300
        assert max(len(stay.worker) for stay in found.stays) <= 300


def some_event(**fixed):
    """Return a strategy of events of few samples, close together in time."""
    return st.builds(
        StageEvent,
        run=st.just("r"),
        group=st.just("g"),
        sample=st.integers(0, 2),
        attempt=st.integers(0, 2),
        stage=st.sampled_from([*PIPELINE, "reaper"]),
        kind=st.sampled_from(EventKind),
        at_ms=st.integers(NOW_MS - 200, NOW_MS),
        detail=st.sampled_from(["", "x", "y"]),
        **fixed,
    )


def only_news(events):
    """Leave out a second wait at the same moment, since of two the later one holds, and what no memory holds."""
    waits, marks, kept = set(), {}, []
    for event in events:
        place = (event.sample, event.stage)
        if event.kind is WAITING:
            if (*place, event.attempt, event.at_ms) in waits:
                continue
            waits.add((*place, event.attempt, event.at_ms))
        elif marks.setdefault(place, 0) == MAX_MARKS:
            continue
        else:
            marks[place] += 1
        kept.append(event)
    return kept


@settings(max_examples=200)
@given(events=st.lists(some_event(), max_size=30).map(only_news), data=st.data())
def test_order_and_copies_of_events_change_nothing(events, data):
    """Late, doubled and reordered events of many workers give one board."""
    copies = data.draw(st.lists(st.sampled_from(events), max_size=10)) if events else []
    mixed = data.draw(st.permutations([*events, *copies]))

    assert board_of(*events).view(NOW_MS) == board_of(*mixed).view(NOW_MS)
    for sample in range(3):
        first, second = (board_of(*order).sample("r", "g", sample, NOW_MS) for order in (events, mixed))
        assert (first is None) == (second is None)
        if first is not None:
            assert (first.state, first.stage, first.in_flight) == (second.state, second.stage, second.in_flight)


@given(events=st.lists(some_event(), max_size=40), most=st.integers(1, 3))
def test_the_view_adds_up_and_stays_within_bounds(events, most):
    """What is in flight is what works; no more is remembered than is allowed."""
    view = board_of(*events, max_samples=most).view(NOW_MS)

    assert sum(stage.in_flight for stage in view.stages) == view.states.get("working", 0)
    assert sum(view.states.values()) <= most
    assert all((stage.oldest is None) == (stage.in_flight == 0) for stage in view.stages)


@st.composite
def lives(draw):
    """Return the events of samples that all end, through attempts, kills and lost last words."""
    events = []
    for sample in range(draw(st.integers(1, 3))):
        at_ms = NOW_MS - 100_000
        attempts = draw(st.integers(1, 3))
        for attempt in range(attempts):
            last = attempt == attempts - 1
            until = len(PIPELINE) if last else draw(st.integers(1, len(PIPELINE)))
            for number, name in enumerate(list(PIPELINE)[:until]):
                at = {"run": "r", "group": "g", "sample": sample, "attempt": attempt, "stage": name}
                for _ in range(draw(st.integers(1, 3))):  # all but the last of these workers were killed
                    at_ms += draw(st.integers(1, 50))
                    events.append(StageEvent(kind=STARTED, at_ms=at_ms, **at))
                at_ms += draw(st.integers(1, 50))
                retried = not last and number == until - 1
                if (last and number == until - 1) or draw(st.booleans()):  # else killed before it could say so
                    events.append(StageEvent(kind=RETRIED if retried else FINISHED, at_ms=at_ms, **at))
    return events


@settings(max_examples=200)
@given(events=lives(), data=st.data())
def test_whatever_was_killed_nothing_stays_in_flight_once_every_sample_is_graded(events, data):
    """In whatever order it becomes known."""
    view = board_of(*data.draw(st.permutations(events))).view(NOW_MS)

    assert [0, 0, 0] == [stage.in_flight for stage in view.stages]
    assert {"done": len({event.sample for event in events})} == view.states


@given(events=lives())
def test_on_the_way_a_sample_is_in_one_stage_at_most(events):
    """After each event, in the order in which things happened."""
    board = Board()
    for before, event in pairwise([None, *events]):
        board.take(event, "w", NOW_MS)
        view = board.view(NOW_MS)
        assert sum(stage.in_flight for stage in view.stages) <= len({one.sample for one in events})
        if event.kind is STARTED:
            assert board.sample("r", "g", event.sample, NOW_MS).state == "working", before
