"""Where an answer ends by its own ids: engines that stop and engines that are cut say the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.inference.base import Generation, VersionSpan
from infra.inference.ends import cut, ending
from schemas.transcript import Repetition, Sampling

STOP = 3


def sampled(ids, finish="length", versions=None):
    """Return an answer of these ids, each id by the version at its place."""
    versions = versions or [0] * len(ids)
    return Generation(
        token_ids=np.array(ids, np.int32),
        logprobs=-0.125 * np.arange(len(ids), dtype=np.float32),
        finish_reason=finish,
        versions=tuple(VersionSpan(start=at, stop=at + 1, version=version) for at, version in enumerate(versions)),
    )


def stops_by_itself(ids, sampling, limit):
    """Return how many ids an engine samples that asks after each one, and its reason."""
    for count, token in enumerate(ids[:limit], start=1):
        if token == STOP:
            return count, "stop"
        if (end := ending(ids[:count], sampling)) is not None:
            return count, end
    return limit, "length"


def samples_on(ids, sampling, limit):
    """Return the same of one that knows stop ids alone and is cut."""
    count = ids.index(STOP) + 1 if STOP in ids[:limit] else limit
    answer = cut(sampled(ids[:count], "stop" if ids[count - 1] == STOP else "length"), sampling, [STOP])
    return len(answer.token_ids), answer.finish_reason


few_ids = st.lists(st.integers(0, 3), min_size=1, max_size=40)
rules = st.builds(
    Sampling,
    stop_sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=2).map(tuple),
    repetition=st.none()
    | st.builds(
        lambda low, more, count: Repetition(max_pattern_size=low + more, min_pattern_size=low, min_count=count),
        st.integers(1, 4),
        st.integers(0, 4),
        st.integers(2, 4),
    ),
)


@given(ids=few_ids, sampling=rules, data=st.data())
def test_an_engine_that_stops_and_one_that_is_cut_give_one_answer(ids, sampling, data):
    """Whichever rules an engine knows by itself: ids and reason are the same."""
    limit = data.draw(st.integers(1, len(ids)))
    assert stops_by_itself(ids, sampling, limit) == samples_on(ids, sampling, limit)


@given(ids=few_ids, sampling=rules)
def test_an_answer_that_is_cut_is_a_prefix_and_cut_but_once(ids, sampling):
    """Nothing is changed before the end, every id keeps its log-prob and version, and nothing more is found after."""
    answer = sampled(ids, versions=list(range(len(ids))))
    found = cut(answer, sampling, [])
    count = len(found.token_ids)
    assert found.token_ids.tolist() == ids[:count]
    assert found.logprobs.tolist() == answer.logprobs[:count].tolist()
    assert found.versions == answer.versions[:count]
    assert len(cut(found, sampling, []).token_ids) == count
    assert count == len(ids) or found.finish_reason in {"stop_sequence", "repetition"}


@pytest.mark.parametrize(
    ("ids", "count"),
    [
        ([1, 2, 1, 2, 1, 2, 7], 6),  # a pattern of two, three times
        ([5, 5, 5, 7], 3),  # one id is a pattern
        ([1, 2, 1, 2, 1, 7, 1, 2], 8),  # two and a half
        ([9, 1, 2, 3, 1, 2, 3, 1, 2, 3], 10),  # not from the beginning
    ],
)
def test_a_loop_is_its_pattern_as_often_as_said(ids, count):
    """The answer ends with the id that completes the last repetition."""
    answer = cut(sampled(ids), Sampling(repetition=Repetition(max_pattern_size=3, min_count=3)), [])
    assert len(answer.token_ids) == count


def test_a_longer_pattern_than_looked_for_is_no_loop():
    """A text may say the same thing twice, and lists repeat themselves."""
    answer = sampled([1, 2, 3, 4] * 4)
    assert cut(answer, Sampling(repetition=Repetition(max_pattern_size=3, min_count=2)), []) is answer


def test_the_first_stop_sequence_counts_and_belongs_to_the_answer():
    """What stands behind it was sampled and is no part of the turn."""
    answer = cut(sampled([4, 5, 6, 7, 8, 6]), Sampling(stop_sequences=((7, 8), (5, 6))), [])
    assert (answer.token_ids.tolist(), answer.finish_reason) == ([4, 5, 6], "stop_sequence")
