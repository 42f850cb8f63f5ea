"""Which rollouts of a step a person is shown, and what the text says of them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from synthetic_log import end

from infra.bus import Record
from infra.wire import Received
from schemas.codec import encode
from tests.golden.samples import SAMPLES
from trainer.group import Group
from trainer.groups import Step
from trainer.rollout_page import Pick, page, picks
from trainer.terminal import OTHER_RUN, terminal

TRAJECTORY = SAMPLES["rollmill.trajectory"]
"""Two turns with process rewards 1/4 and 0, five sampled tokens, reward -1/2."""


def step(number, *samples):
    group = Group(id="g", admission=None, first=0, completed=samples, excluded=0)
    return Step(number=number, groups=(group,), advantages=(), position=0, buffered=(), missing=0, recorded=None)


def sample(at, reward, tokens):
    return end(at, "g", at, reward, sampled=((0, tokens),))


def graded(**changes):
    """Return the golden sample as the trainer sees it."""
    raw = encode(TRAJECTORY)
    record = Record(topic="trajectories", partition=0, offset=7, timestamp_ms=0, key=None, value=raw)
    return replace(terminal(Received(record, TRAJECTORY, raw), None), **changes)


def words(ids):
    return " ".join(f"t{token}" for token in ids.tolist())


def test_the_best_the_worst_the_longest_and_a_random_one_are_picked():
    """Of equal ones the first; chance follows from seed and step alone."""
    made = [
        sample(at, reward, tokens) for at, (reward, tokens) in enumerate([(0, 5), (2, 3), (-1, 9), (2, 9), (-1, 4)])
    ]
    found = {reason: pick.sample.sample for pick in picks(step(4, *made), 1) for reason in pick.reasons}

    assert {reason: found[reason] for reason in ("best", "worst", "longest")} == {"best": 1, "worst": 2, "longest": 2}
    assert picks(step(4, *made), 1) == picks(step(4, *made), 1)
    by_step = {picks(step(n, *made), seed)[-1] for n in range(20) for seed in (1, -1)}
    assert len(by_step) > 1


def test_a_rollout_that_is_several_of_them_is_shown_once():
    (only,) = picks(step(1, sample(0, 1.0, 3)), 0)

    assert only.reasons == ("best", "worst", "longest", "random")


def test_what_was_told_said_and_done_is_kept_apart_with_the_reward_of_each_turn():
    """Its name finds it in `rollmill show`, its offset in the log."""
    found = graded()
    text = page("my-run", 10, (Pick(reasons=("best", "random"), sample=found),), words)
    lines = text.splitlines()
    task, turns = TRAJECTORY.task, TRAJECTORY.transcript.turns
    ids = TRAJECTORY.transcript.token_ids

    assert lines[0] == f"== step 10, best and random: my-run/{task.group}/{task.sample}"
    assert lines[1].startswith("reward -0.5 (door 0, format -0.5), success 0")
    assert lines[1].endswith("; 2 turns, 5 sampled tokens of version 5 to 6; offset 7")
    assert "-- turn 1, reward 0.25" in lines
    assert f"    told | {words(ids[turns[0].start : turns[0].sampled])}" in lines
    assert f"    said | {words(ids[turns[0].sampled : turns[0].stop])}" in lines
    for turn in turns:
        assert f"{'did' if turn.valid else 'refused':>8} | {turn.action}".rstrip() in lines


def test_a_long_text_is_cut_in_its_middle_for_a_terminal_only():
    """Both its ends are worth reading."""
    picked = (Pick(reasons=("best",), sample=graded()),)

    def long(ids):
        return "a" * 500 + "z" * 500

    assert "[... 960 characters ...]" in page("r", 1, picked, long, 40)
    assert "a" * 500 + "z" * 500 in page("r", 1, picked, long)


def test_control_characters_are_shown_and_lines_stay_behind_their_margin():
    """Neither a policy nor an environment can draw over what stands beside it, or invent a turn."""
    picked = (Pick(reasons=("best",), sample=graded()),)
    text = page("r", 1, picked, lambda ids: "\x1b[2Jhe\n-- turn 9\r")

    assert "\x1b" not in text
    assert "\r" not in text
    assert "    told | \\x1b[2Jhe\n         | -- turn 9\\x0d" in text


def test_a_history_that_was_rewritten_and_what_came_last_are_told():
    """So is an end by a limit, and whose weights spoke if they were another run's."""
    record = TRAJECTORY.transcript
    second = record.turns[1].start
    record = msgspec.structs.replace(record, segments=(0, second), turns=record.turns)
    text = page(
        "r",
        1,
        (Pick(reasons=("best",), sample=graded(transcript=record, truncated=True, sampled=((OTHER_RUN, 5),))),),
        words,
    )

    assert "-- turn 2, reward 0, the history was rewritten before it" in text
    assert ", cut off by a limit; 2 turns, 5 sampled tokens of another run's weights" in text


@pytest.mark.parametrize("most", [None, 10])
def test_a_rollout_without_a_token_record_says_so(most):
    """It was graded all the same."""
    text = page("r", 1, (Pick(reasons=("worst",), sample=graded(transcript=None)),), words, most)

    assert text.endswith("graded without a token record\n")
