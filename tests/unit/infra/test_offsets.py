"""Progress on one partition when work completes out of order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infra.bus import Committed
from infra.offset_map import decode
from infra.offsets import MAX_WINDOW, NEVER, SUSPECT_STARTS, Progress, Start


def started(*offsets: int, base: int = 0) -> Progress:
    progress = Progress(Committed(base))
    for offset in offsets:
        progress.start(offset)
    return progress


def test_a_partition_that_was_only_assigned_keeps_its_offset():
    """The first commit of a new group says where it stands."""
    assert Committed(4) == Progress(Committed(4)).committable()


def test_the_lowest_offset_in_flight_holds_the_commit_back():
    """Later offsets that are done do not pass an earlier one that is not."""
    progress = started(5, 6, 7, base=5)
    progress.finish(6)
    progress.finish(7)

    assert progress.committable().offset == 5
    assert progress.completed_ahead == 2

    progress.finish(5)

    assert Committed(8) == progress.committable()
    assert progress.completed_ahead == 0


def test_a_gap_in_the_log_counts_as_done():
    """Offsets that were never handed out (compaction, markers) do not hold the commit back."""
    progress = started(3, 9, base=1)
    progress.finish(3)

    assert progress.committable().offset == 9


def test_a_gap_at_the_end_of_the_log_counts_as_done():
    """No record comes after it that could say so; what is in flight holds the commit back all the same."""
    progress = started(0, 1)
    progress.finish(0)
    progress.pass_to(3)

    assert (1, 3) == (progress.committable().offset, progress.next_offset)

    progress.finish(1)
    progress.pass_to(2)

    assert Committed(3) == progress.committable()


def test_what_an_earlier_owner_began_and_the_log_no_longer_has_is_a_gap_too():
    """Also when nothing comes after it."""
    progress = started(0, 1, 2)
    progress.finish(1)
    heir = Progress(progress.committable())
    heir.pass_to(1)

    assert {2: 1} == decode(heir.committable()).unfinished
    heir.pass_to(3)

    assert Committed(3) == heir.committable()


def test_a_record_that_retention_removed_before_it_was_done_is_a_gap():
    """The map names it, the log no longer has it: the next record says so."""
    progress = started(0, 1, 2)
    progress.finish(1)
    heir = Progress(progress.committable())

    assert heir.start(2) == Start(1)
    heir.finish(2)

    assert Committed(3) == heir.committable()


def test_a_redelivered_offset_is_not_started_twice():
    """In flight, done above the commit, or committed: none of them is taken again."""
    progress = started(0, 1, 2)
    progress.finish(0)
    progress.finish(2)
    progress.committable()

    assert [None, None, None] == [progress.start(offset) for offset in (0, 1, 2)]


def test_an_heir_repeats_only_what_was_in_flight():
    """What is done above the committed offset is not worked on again."""
    progress = started(0, 1, 2, 3)
    progress.finish(1)
    progress.finish(3)
    heir = Progress(progress.committable())

    assert [heir.start(offset) for offset in range(5)] == [Start(1), None, Start(1), None, NEVER]


def test_starts_without_an_end_add_up_until_the_record_is_suspect():
    """Each owner that vanishes leaves its start behind."""
    committed = Committed(0)
    seen = []
    for _ in range(SUSPECT_STARTS + 1):
        progress = Progress(committed)
        seen.append(progress.start(0))
        committed = progress.committable()

    assert [(one.starts, one.suspect) for one in seen] == [(0, False), (1, False), (2, True)]


def test_only_the_death_of_its_own_process_proves_a_suspect():
    """Owners that vanish while it runs alone say nothing against it."""
    progress = Progress(Committed(0, ""))
    progress.start(0)
    progress = Progress(progress.committable())
    progress.start(0)
    for _ in range(3):
        progress = Progress(progress.committable())
        start = progress.start(0)
    assert start.suspect
    assert not start.proven

    assert progress.died(0).proven
    assert Progress(progress.committable()).start(0).proven


def test_work_that_is_handed_back_alive_is_no_suspect():
    """A rebalance or an orderly stop is not the fault of what was in flight."""
    committed = Committed(0)
    for _ in range(5):
        progress = Progress(committed)
        start = progress.start(0)
        committed = progress.committable(handed_back=True)

    assert start == NEVER


def test_a_window_that_is_too_wide_waits_for_its_slowest_record():
    """Its map would not fit the log for ever."""
    progress = started(0)
    progress.start(MAX_WINDOW - 1)
    assert progress.full
    progress.finish(0)

    assert not progress.full


@given(st.text(max_size=20))
def test_a_foreign_text_beside_the_offset_changes_nothing(text):
    """The group goes on from the offset alone."""
    progress = Progress(Committed(3, text))

    assert progress.next_offset == 3
    assert progress.start(3) == NEVER


class Group(RuleBasedStateMachine):
    """A partition through random work, crashes, hand-overs and kept rebalances.

    The model knows of each offset whether its work ended; the group knows only what it committed.
    """

    END = 40

    def __init__(self) -> None:
        super().__init__()
        self.committed = Committed(0)
        self.progress = Progress(self.committed)
        self.position = 0
        self.running: list[int] = []
        self.ended: set[int] = set()
        self.ended_here: set[int] = set()
        """Of these, the ends that the present owner saw."""
        self.told: set[int] = set()
        """Ended, and the log knows: no later owner may run it again."""

    @precondition(lambda self: self.position < self.END)
    @rule()
    def hand_out(self) -> None:
        """The next record arrives."""
        offset, self.position = self.position, self.position + 1
        if self.progress.start(offset) is not None:
            assert offset not in self.told, "work that the log called done runs again"
            self.running.append(offset)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        """One job ends, any of them."""
        offset = self.running.pop(which % len(self.running))
        self.progress.finish(offset)
        self.ended.add(offset)
        self.ended_here.add(offset)

    @rule(handed_back=st.booleans())
    def commit(self, handed_back: bool) -> None:
        """The group's progress is stored."""
        self.committed = self.progress.committable(handed_back=handed_back)
        self.told |= self.ended_here

    @rule()
    def crash(self) -> None:
        """The owner vanishes; the next one has only what was committed. Ends it did not tell are repeated."""
        self.progress = Progress(self.committed)
        self.position = self.committed.offset
        self.running = []
        self.ended_here = set()

    @rule()
    def keep(self) -> None:
        """A rebalance that leaves the partition here: work goes on, records come again from where we say."""
        self.position = self.progress.next_offset

    @invariant()
    def nothing_is_lost(self) -> None:
        """Below the committed offset all has ended; above it, what the map calls done has."""
        assert all(offset in self.ended for offset in range(self.committed.offset))
        known = decode(self.committed)
        if known is not None:
            done = set(range(self.committed.offset, known.upper)) - known.unfinished.keys()
            assert done <= self.ended

    def teardown(self) -> None:
        """Left alone, the partition comes to its end, and everything was done."""
        self.crash()
        while self.position < self.END or self.running:
            if self.running:
                self.end(0)
            else:
                self.hand_out()
        assert Committed(self.END) == self.progress.committable()
        assert self.ended == set(range(self.END))


TestGroup = Group.TestCase
TestGroup.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("base", [0, 5])
def test_progress_of_an_heir_starts_where_the_group_is(base):
    """Offsets below the committed one are never taken."""
    progress = Progress(Committed(base))

    assert base == progress.next_offset
    assert progress.start(base - 1) is None
