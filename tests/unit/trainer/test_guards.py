"""When a figure is an alarm: on which side of its bound, after how many steps, and how often."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import ConfigError
from schemas.decisions import Action, Alarm, Branch, Guard, RunEnded, StepDecided, TrainerStarted
from trainer.config import make_config
from trainer.guards import Figures, judge, recent_success, unearned
from trainer.guards_config import GuardsConfig
from trainer.history import History
from trainer.repetition import mean_repetition, repetition

CALM = Figures(entropy=1.0, repetition=0.1, unearned=0.2, kl=0.01, recent_success=0.5)
BASE = {"run": "r", "model": "m", "directory": "d"}


def rules(**guards):
    return GuardsConfig.model_validate(guards)


def alarms(config, steps):
    """Return (step, guard, steps in a row) of each alarm over the figures of some steps."""
    counts, found = {}, []
    for number, figures in enumerate(steps, 1):
        counts, due = judge(config, counts, figures)
        found += [(number, finding.guard, finding.steps) for finding in due]
    return found


@pytest.mark.parametrize(
    ("guard", "bound", "bad"),
    [
        (Guard.ENTROPY, 0.1, {"entropy": 0.09}),
        (Guard.REPETITION, 0.5, {"repetition": 0.51}),
        (Guard.FARMING, 0.5, {"unearned": 0.6}),
        (Guard.KL, 0.2, {"kl": 0.21}),
        (Guard.BASELINE, 0.3, {"recent_success": 0.3}),
    ],
)
def test_each_guard_looks_at_its_figure_and_its_side_of_the_bound(guard, bound, bad):
    """A calm step is none, and no other guard's figure matters."""
    config = rules(**{guard.value: {"bound": bound, "steps": 1}})

    assert alarms(config, [CALM, replace(CALM, **bad)]) == [(2, guard, 1)]
    assert alarms(GuardsConfig(), [replace(CALM, **bad)]) == []


def test_one_bad_step_proves_nothing():
    """Only so many in a row do, and a calm step between them begins anew."""
    low = replace(CALM, entropy=0.0)
    config = rules(entropy={"bound": 0.1, "steps": 3})

    assert alarms(config, [low, low, CALM, low, low, low]) == [(6, Guard.ENTROPY, 3)]


def test_an_alarm_is_raised_once_until_it_is_calm_again():
    """Nobody is told the same every few steps."""
    low = replace(CALM, entropy=0.0)
    config = rules(entropy={"bound": 0.1, "steps": 2})

    assert [step for step, *_ in alarms(config, [low] * 9 + [CALM] + [low] * 3)] == [2, 12]


def test_a_rate_that_was_halved_in_vain_is_halved_again():
    """After as many steps as before."""
    far = replace(CALM, kl=1.0)
    config = rules(kl={"bound": 0.1, "steps": 2, "action": "slow"})

    assert [step for step, *_ in alarms(config, [far] * 7)] == [2, 4, 6]


def test_a_step_that_says_nothing_is_no_bad_one():
    """No sample failed, or too few groups are complete for a mean."""
    config = rules(farming={"bound": 0.1, "steps": 1}, baseline={"bound": 0.9, "steps": 1})

    assert alarms(config, [replace(CALM, unearned=None, recent_success=None)]) == []


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30), st.integers(1, 4))
def test_counting_goes_on_from_a_checkpoint(bad, cut, steps):
    """Whoever takes over with the counts raises what the one before would have raised."""
    config = rules(kl={"bound": 0.1, "steps": steps, "action": "slow"})
    figures = [replace(CALM, kl=1.0 if one else 0.0) for one in bad]

    counts = {}
    for one in figures[:cut]:
        counts, _ = judge(config, counts, one)
    rest = []
    for number, one in enumerate(figures[cut:], len(figures[:cut]) + 1):
        counts, due = judge(config, counts, one)
        rest += [(number, finding.guard, finding.steps) for finding in due]

    assert rest == [found for found in alarms(config, figures) if found[0] > len(figures[:cut])]


def test_the_cause_names_figure_bound_and_steps():
    """A person can follow it."""
    config = rules(
        entropy={"bound": 0.1, "steps": 1},
        repetition={"bound": 0.5, "steps": 1},
        baseline={"bound": 0.3, "rule": "random", "steps": 1},
    )
    _, found = judge(config, {}, replace(CALM, entropy=0.04, repetition=0.75, recent_success=0.25))

    assert [finding.cause for finding in found] == [
        "entropy of 0.04 nats, below 0.1",
        "75.0% of an episode's n-grams are repeated, above 0.5",
        "success of 0.250, not above the 0.300 of random",
    ]


# ---- figures


@pytest.mark.parametrize(
    ("tokens", "n", "share"),
    [
        ([1, 2, 3, 4, 5], 2, 0.0),
        ([1, 1, 1, 1, 1], 2, 0.75),
        ([1, 2, 1, 2, 1, 2], 2, 0.6),
        ([1, 2, 3, 1, 2, 3], 3, 0.25),
        ([1, 2], 2, 0.0),
        ([1], 2, None),
        ([], 1, None),
    ],
)
def test_repetition_is_the_share_of_ngrams_that_were_there_before(tokens, n, share):
    """Counted by hand."""
    assert repetition(np.array(tokens, dtype=np.int32), n) == (None if share is None else pytest.approx(share))


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2), max_size=40), st.integers(1, 5))
def test_repetition_agrees_with_a_set_of_tuples(tokens, n):
    """Whatever the ids are."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    expected = 1 - len(set(grams)) / len(grams) if grams else None

    assert repetition(np.array(tokens, dtype=np.int32), n) == expected


def test_only_what_the_policy_said_counts():
    """An environment that always answers the same does not make an episode a repetition."""
    said = SimpleNamespace(token_ids=np.array([7, 1, 7, 2, 7, 3], dtype=np.int32), mask_array=np.array([0, 1] * 3))
    stutters = SimpleNamespace(token_ids=np.array([4, 4, 4], dtype=np.int32), mask_array=np.array([1] * 3))

    assert mean_repetition([said], 1) == 0.0
    assert mean_repetition([said, None, stutters], 1) == pytest.approx(1 / 3)
    assert mean_repetition([None], 1) == 0.0


def test_what_failed_samples_earn_holds_process_rewards():
    """Samples that succeeded earned theirs."""

    def sample(success, reward, *of_turns):
        return SimpleNamespace(success=success, reward=reward, turn_rewards=of_turns)

    assert unearned([sample(1.0, 5.0), sample(0.0, 0.0, 0.3, 0.3), sample(0.4, 0.2)]) == pytest.approx(0.4)
    assert unearned([sample(1.0, 5.0)]) is None


def test_the_recent_success_is_known_once_there_are_enough_groups():
    """A mean of three groups is none to be compared with."""
    assert recent_success([0.5] * 3, 4) is None
    assert recent_success([0.5, 1.0, 0.0, 0.5], 4) == 0.5


# ---- the configuration


def test_a_guard_of_what_is_not_measured_is_refused():
    """KL is 0 while its term is off, so its guard would never see anything."""
    with pytest.raises(ConfigError, match=r"guards\.kl needs algorithm\.kl above 0"):
        make_config({**BASE, "guards": {"kl": {"bound": 0.1}}})
    make_config({**BASE, "guards": {"kl": {"bound": 0.1}}, "algorithm": {"kl": 1e-6}})


def test_a_baseline_needs_a_figure_or_a_rule():
    """The error says both."""
    with pytest.raises(ConfigError, match="give `bound`, a mean success, or `rule`"):
        make_config({**BASE, "guards": {"baseline": {"steps": 5}}})


# ---- what the log says of alarms


def alarm(step, action=Action.SLOW, guard=Guard.KL):
    scale = 0.5 if action is Action.SLOW else 1.0
    values = {"value": 1.0, "bound": 0.1, "steps": 1, "cause": "made up", "lr_scale": scale}
    return Alarm(run="r", epoch=0, step=step, guard=guard, action=action, **values)


def step(number):
    return StepDecided(run="r", epoch=0, step=number, position=number, members=(), digest="", advantage_digest="")


def history(*decisions):
    return History.of(enumerate([TrainerStarted(run="r", config={}, start=0, step=0), *decisions]))


def test_an_alarm_halves_the_rate_of_the_steps_decided_after_it():
    """And again after the next one."""
    found = history(step(1), alarm(1), step(2), step(3), alarm(3))

    assert [found.lr_scale(number) for number in (1, 2, 3, 4)] == [1.0, 0.5, 0.5, 0.25]


def test_an_alarm_of_an_undone_step_halves_nothing():
    """What comes after the branch never was on that line."""
    branch = Branch(run="r", epoch=0, from_step=1, position=3)
    found = history(step(1), step(2), alarm(2), step(3), branch, step(2))

    assert found.alarms == {}
    assert found.lr_scale(3) == 1.0


def test_an_alarm_that_ends_a_run_stands_until_the_end_is_written():
    """A trainer that was killed in between is followed by one that writes it."""
    ended = RunEnded(run="r", epoch=0, position=2, step=1, reason="ended by its guard")

    assert history(step(1), alarm(1, Action.STOP)).stopped_by is not None
    assert history(step(1), alarm(1, Action.STOP), ended).stopped_by is None
    assert history(step(1), alarm(1, Action.TELL)).stopped_by is None
