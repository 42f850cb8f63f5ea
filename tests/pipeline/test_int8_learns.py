"""The demo's task and model, trained in float32 on what an int8 policy samples, beside the same on a float32 policy."""

import numpy as np
import pytest

from benchmarks.learning import Run, learn_all

pytestmark = pytest.mark.slow

STEPS, EPISODES, PROCESSES = 6, 128, 2

SYNCHRONOUS = {"max_lag": 0}
"""Every token is sampled by the weights that it trains, so arithmetic is all that sets engine and trainer apart."""

NARROW = [0.995, 1.005]
"""Bounds within which rounded weights leave most tokens, and not all."""

RUNS = {
    "float32": Run(name="float32", seed=0, algorithm=SYNCHRONOUS, steps=STEPS, episodes=EPISODES),
    "int8": Run(name="int8", seed=0, dtype="int8", algorithm=SYNCHRONOUS, steps=STEPS, episodes=EPISODES),
    "icepop": Run(
        name="icepop",
        seed=0,
        dtype="int8",
        algorithm={**SYNCHRONOUS, "correction": "icepop", "icepop": NARROW},
        steps=STEPS,
        episodes=EPISODES,
    ),
}


@pytest.fixture(scope="module")
def learnt():
    """Return what each run came to, all from one warm start."""
    return dict(zip(RUNS, learn_all(list(RUNS.values()), PROCESSES), strict=True))


def told(learnt, name, metric):
    """Return a metric of a run, step by step."""
    values = np.array(learnt[name].figures[f"trainer.{metric}"])
    assert len(values) == STEPS
    return values


@pytest.mark.parametrize("name", RUNS)
def test_the_policy_learns_the_demos_task(learnt, name):
    """On held-out hunts, played by the same engine, it does better than before by more than chance."""
    one = learnt[name]

    assert one.rose, f"{one.before.success:.2f} -> {one.after.success:.2f}, in training {one.curve}"
    assert (len(one.replayed.steps), one.replayed.all_equal) == (STEPS, True), one.replayed.summary()


def test_each_record_says_what_sampled_it(learnt):
    """Its spans carry the engine's number format."""
    assert {name: one.formats for name, one in learnt.items()} == {
        "float32": {"float32"},
        "int8": {"int8"},
        "icepop": {"int8"},
    }


def test_the_mismatch_is_reported_at_every_step(learnt):
    """It is float noise with a float32 engine; with int8 it is larger by orders of magnitude, and no reason to stop."""
    noise, mismatch = (told(learnt, name, "mismatch_lag0_nats") for name in ("float32", "int8"))

    assert noise.max() < 1e-5
    assert 1e-4 < mismatch.min() <= mismatch.max() < 0.1


def test_the_mismatch_is_corrected(learnt):
    """Tokens weigh other than 1 where the engine is int8, and those that a narrow IcePop does not trust nothing."""
    noise, weight = (np.abs(told(learnt, name, "importance_weight_mean") - 1) for name in ("float32", "int8"))
    assert noise.max() < 3e-6 < weight.max()

    left_out = {name: told(learnt, name, "distrusted_share") for name in RUNS}
    assert left_out["float32"].max() == left_out["int8"].max() == 0
    assert 0 < left_out["icepop"].min() <= left_out["icepop"].max() < 0.5
