"""Which cached prefix a prompt may reuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.inference.local_server.slots import SlotTable


def ids(*values):
    return np.array(values, dtype=np.int32)


def run(table, prompt, answer=()):
    """Assign a prompt, compute it and its answer, and leave the slot busy."""
    assignment = table.assign(prompt)
    known = [*prompt.tolist(), *answer]
    table.tokens[assignment.slot, : len(known)] = known
    # The last sampled id is known but its keys were never needed.
    table.computed[assignment.slot] = len(known) - (1 if answer else 0)
    return assignment


def test_the_next_turn_reuses_its_own_slot():
    """A prompt that extends a finished request computes only what is new."""
    table = SlotTable(4, 32)
    first = run(table, ids(1, 2, 3), answer=(4, 5))
    table.release(first.slot)
    second = table.assign(ids(1, 2, 3, 4, 5, 6, 7))
    assert (second.slot, second.copy_from, second.reused) == (first.slot, None, 4)


def test_a_sibling_copies_the_prefix_of_a_busy_slot():
    """Samples of a group share their prompt while the first of them still runs."""
    table = SlotTable(4, 32)
    first = run(table, ids(1, 2, 3))
    sibling = table.assign(ids(1, 2, 3))
    assert sibling.slot != first.slot
    assert (sibling.copy_from, sibling.reused) == (first.slot, 2)


def test_a_kept_episode_is_not_overwritten_by_a_shorter_match():
    """A prompt that shares only the system prompt goes elsewhere, so the episode's next turn still finds its own."""
    table = SlotTable(4, 32)
    episode = run(table, ids(9, 9, 1, 2, 3))
    table.release(episode.slot)
    other = table.assign(ids(9, 9, 7, 7))
    assert (other.copy_from, other.reused) == (episode.slot, 2)
    assert other.slot != episode.slot
    assert table.assign(ids(9, 9, 1, 2, 3, 4)).slot == episode.slot


def test_the_longest_unused_slot_is_given_away():
    """With all slots written, the least recently used one goes."""
    table = SlotTable(2, 8)
    old, new = run(table, ids(1, 1, 1)), run(table, ids(2, 2, 2))
    table.release(old.slot)
    table.release(new.slot)
    assert table.assign(ids(3, 3)).slot == old.slot


def test_forgetting_makes_everything_unfindable():
    """After a change of weights neither free nor running content serves another prompt, even once released."""
    table = SlotTable(4, 32)
    free, busy = run(table, ids(1, 2, 3)), run(table, ids(4, 5, 6))
    table.release(free.slot)
    table.forget()
    assert table.computed[busy.slot] == 3
    assert table.assign(ids(1, 2, 3)).reused == 0
    assert run(table, ids(4, 5, 6, 8)).reused == 0
    table.release(busy.slot)
    # Found again: what the new weights computed, and not the longer match that the old ones did.
    again = table.assign(ids(4, 5, 6, 7))
    assert (again.reused, again.copy_from == busy.slot) == (3, False)


def test_no_free_slot_is_an_error():
    """The caller asks first."""
    table = SlotTable(1, 8)
    table.assign(ids(1, 2))
    with pytest.raises(LookupError):
        table.assign(ids(1, 2))


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.booleans(), st.booleans()),
        max_size=30,
    )
)
def test_reused_content_is_always_the_prompts_own(steps):
    """Whatever happened before, the positions counted as reused hold keys of exactly these ids and weights."""
    table = SlotTable(3, 8)
    keys = np.full((3, 8), -1)  # what lies in the cache: id + 10 * weights
    weights, busy = 0, []
    for prompt, release, forget in steps:
        if not table.free:
            table.release(busy.pop(0))
        assignment = table.assign(np.array(prompt, dtype=np.int32))
        assert assignment.reused < len(prompt)
        if assignment.copy_from is not None:
            keys[assignment.slot, : assignment.reused] = keys[assignment.copy_from, : assignment.reused]
        expected = np.array(prompt[: assignment.reused]) + 10 * weights
        np.testing.assert_array_equal(keys[assignment.slot, : assignment.reused], expected)
        keys[assignment.slot, assignment.reused : len(prompt)] = np.array(prompt[assignment.reused :]) + 10 * weights
        table.computed[assignment.slot] = len(prompt)
        busy.append(assignment.slot)
        if release:
            table.release(busy.pop())
        if forget:
            table.forget()
            weights += 1
