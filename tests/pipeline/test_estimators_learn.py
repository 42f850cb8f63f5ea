"""The demo's task and model, trained with each estimator through feeder, stages and trainer on the log in memory."""

import pytest

from benchmarks.learning import Run, learn_all
from rollmill.demo.control import rose

pytestmark = pytest.mark.slow

STEPS, EPISODES, PROCESSES = 6, 128, 2

ESTIMATORS = {
    "grpo": {"clip_high": 0.2, "level": "sample", "filter": "off"},
    "dapo": {},
    "dr-grpo": {"std": False},
    "rloo": {"estimator": "rloo"},
    "reinforce": {"estimator": "reinforce++"},
    "gae-of-turns": {"estimator": "gae", "credit": "turn"},
    "gae-of-tokens": {"estimator": "gae", "credit": "token"},
}


@pytest.fixture(scope="module")
def learnt():
    """Return what each of them and the control came to, all from one warm start."""
    wanted = {**ESTIMATORS, "shuffled": {"shuffle_seed": 0}}
    runs = [
        Run(name=name, seed=0, algorithm=changes, steps=STEPS, episodes=EPISODES) for name, changes in wanted.items()
    ]
    return dict(zip(wanted, learn_all(runs, PROCESSES), strict=True))


def summary(learnt):
    """Return what to know of a run that did not do what it should."""
    return f"{learnt.before.success:.2f} -> {learnt.after.success:.2f}, in training {learnt.curve}"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_learns_the_demos_task(learnt, name):
    """On held-out hunts it does better than the model it began with, by more than chance."""
    assert learnt[name].rose, summary(learnt[name])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_run_replays(learnt, name):
    """All of its steps are made again from the log alone."""
    report = learnt[name].replayed

    assert (len(report.steps), report.all_equal) == (STEPS, True), report.summary()


def test_the_control_falls_behind(learnt):
    """The same run on rewards that siblings have traded ends far below: what the others learnt was their reward."""
    control = learnt["shuffled"]

    assert rose(control.after, learnt["dapo"].after), summary(control)
    assert not control.rose, summary(control)
    assert control.replayed.all_equal
