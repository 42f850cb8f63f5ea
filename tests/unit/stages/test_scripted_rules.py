"""Scripted rules: what a family is played by without a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from infra.errors import ConfigError
from rollmill.baseline import with_baseline
from schemas.messages import Task
from stages.handlers.keydoor import KeyDoor
from stages.handlers.rules import play, rule_of
from trainer.config import make_config


def task(seed, horizon=20, **payload):
    return Task(
        run="r",
        group=f"g{seed}",
        sample=0,
        samples=1,
        source="s",
        payload=payload,
        payload_digest="",
        family="keydoor",
        seed=seed,
        start_by_ms=0,
        horizon=horizon,
    )


def success(name, plays=200, **options):
    family = KeyDoor()
    return sum(play(family, rule_of(family, name), task(seed, **options)) for seed in range(plays)) / plays


def test_the_compass_leads_to_every_door_and_chance_to_few():
    """A rule sees the hint, as the policy does."""
    assert success("compass", turns=20) == 1.0
    assert success("random") < 0.02


def test_a_rule_has_no_more_turns_than_the_task():
    """Nobody opens a door in two."""
    assert success("compass", horizon=2) == 0.0


def test_the_same_task_ends_alike():
    """Its dice follow from the task."""
    family = KeyDoor()
    rule = rule_of(family, "random")

    assert [play(family, rule, task(seed)) for seed in range(50)] == [
        play(family, rule, task(seed)) for seed in range(50)
    ]


def test_an_unknown_rule_is_answered_by_the_known_ones():
    """A family may have none."""
    with pytest.raises(ConfigError, match=r"family 'keydoor' has no rule 'expert': it has compass, random"):
        rule_of(KeyDoor(), "expert")
    with pytest.raises(ConfigError, match=r"no rule 'random': it has none"):
        rule_of(SimpleNamespace(family="made-up"), "random")


# ---- the run's baseline


def run_of(**baseline):
    return make_config(
        {
            "run": "r",
            "model": "m",
            "directory": "d",
            "tasks": {"family": "keydoor", "payload": {"turns": 20}},
            "algorithm": {"horizon": 12},
            "guards": {"baseline": baseline},
        }
    )


def test_a_rule_is_played_on_the_runs_own_tasks(tmp_path):
    """With the run's horizon: some hunts are longer than twelve turns. It is the same at each start."""
    run = with_baseline(run_of(rule="compass", tasks=100), tmp_path)

    assert 0.5 < run.guards.baseline.bound < 1.0
    assert with_baseline(run_of(rule="compass", tasks=100), tmp_path) == run


def test_a_figure_that_is_given_is_taken_as_it_is(tmp_path):
    """Nothing is played; neither is anything without a guard."""
    given = run_of(rule="unknown", bound=0.25)

    assert with_baseline(given, tmp_path) is given


def test_a_rule_that_cannot_be_played_is_named(tmp_path):
    """Before anything else starts."""
    with pytest.raises(ConfigError, match="has no rule 'unknown'"):
        with_baseline(run_of(rule="unknown"), tmp_path)
