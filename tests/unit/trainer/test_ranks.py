import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore

from tests.unit.trainer import ranked
from tests.unit.trainer.synthetic_batch import batch, create_model
from trainer import crew
from trainer.config import make_config
from trainer.learner import Learner
from trainer.ranks import ALONE, Ranks, ranks_here, share
from trainer.torch_ranks import TorchRanks

LIMIT_S = 600.0
"""Longest wait for all ranks to end, seconds: each has to import torch on a machine that may be busy."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the directory of a model of a few thousand parameters."""
    return create_model(tmp_path_factory.mktemp("model") / "m")


class Others(Ranks):
    """Rank 0 as the others hear it: what is told is done again by a learner beside it."""

    def __init__(self):
        self.told = []

    def tell(self, call):
        """Keep it for the others."""
        self.told.append(call)

    def heard(self):
        """Return what was told."""
        return iter(self.told)


def config(model, tmp_path, **algorithm):
    return make_config(
        {"run": "r", "seed": 7, "model": model, "directory": tmp_path, "algorithm": {**ranked.ALGORITHM, **algorithm}}
    )


def test_a_rank_alone_makes_all_passes_and_has_everything():
    """The twin of several ranks leaves a step as it is."""
    values = {1: torch.ones(2)}

    assert ALONE.share(["a", "b"]) == [("a", True), ("b", True)]
    assert ALONE.merge(values) is values
    assert ALONE.sum([1.0, 2.5]) == [1.0, 2.5]
    assert ALONE.whole(values[1]) is values[1]
    assert ALONE.part(values[1], torch.zeros(2)) is values[1]
    assert list(ALONE.heard()) == []
    with ALONE as entered:
        assert entered is ALONE


@pytest.mark.parametrize("passes", range(6))
def test_every_pass_counts_once_and_all_ranks_make_as_many(passes):
    """Collectives would wait for ever for a rank that makes one less."""
    given = list(range(passes))

    shares = [share(given, rank, 3) for rank in range(3)]

    assert len({len(each) for each in shares}) == 1
    assert sorted(one for each in shares for one, counts in each if counts) == given


@pytest.mark.parametrize("name", ranked.CASES)
def test_a_process_group_of_one_trains_as_the_twin_does(model, tmp_path, monkeypatch, name):
    """Sharding, gathering and cutting a checkpoint change no bit."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for where in ("alone", "ranks"):
        (tmp_path / where).mkdir()
    wanted = ranked.train(name, model, tmp_path / "alone", ALONE)

    with warnings.catch_warnings(), TorchRanks(HashStore(), 0, 1) as ranks:
        found = ranked.train(name, model, tmp_path / "ranks", ranks)

    assert found == [pytest.approx(each, rel=1e-6) for each in wanted]
    for file in ("kept", "trained", "published"):
        assert (tmp_path / "ranks" / f"{name}.{file}").read_bytes() == (
            tmp_path / "alone" / f"{name}.{file}"
        ).read_bytes()


def test_a_rank_waits_for_the_next_word_as_long_as_it_takes(monkeypatch):
    """Each single wait has a limit, after which it says what it waits for; the last word is the end."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, said = HashStore(), []

    class Answer(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())
            store.set("told/0", "end")

    handler, log = Answer(), logging.getLogger("trainer.torch_ranks")
    monkeypatch.setattr(log, "level", logging.INFO)
    log.addHandler(handler)
    try:
        with TorchRanks(store, 0, 1, hear_limit_s=0.01) as ranks:
            assert list(ranks.heard()) == []
    finally:
        log.removeHandler(handler)

    assert said == ["rank 0 waits for rank 0 to say what is trained next"]
    assert store.get("told/1") == b"end"


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_a_process_that_was_not_started_beside_others_is_alone(monkeypatch, environment):
    """Also where torchrun started one."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert ranks_here() is ALONE


def test_a_run_of_one_rank_has_a_learner_that_tells_nobody(model, tmp_path):
    """Nothing stands between it and its model."""
    assert type(crew.load_learner(config(model, tmp_path), ALONE)) is Learner


def test_what_rank_0_is_asked_for_all_learners_do(model, tmp_path):
    """Load, steps, a restore: whoever heard it all has the same weights."""
    others = Others()
    leader = crew.load_learner(config(model, tmp_path), others)
    leader.step(batch(1))
    file = tmp_path / "model.safetensors"
    file.write_bytes(leader.trained_weights())
    kept = leader.optimizer_bytes()
    leader.step(batch(2))
    leader.restore(file, kept)
    leader.lr_scale = 0.5
    leader.step(batch(3))
    weights = leader.weights()
    leader.canary()

    followers = []

    class Follower(Learner):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            followers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "Learner", Follower)
        crew.follow(others)

    (follower,) = followers
    assert follower.weights() == weights
    assert [call.name for call in others.told[1:]] == [
        "step",
        "trained_weights",
        "optimizer_bytes",
        "step",
        "restore",
        "step",
        "weights",
        "canary",
    ]


def test_a_word_that_no_learner_knows_ends_the_rank(model, tmp_path):
    """Ranks of two versions must not go on beside each other."""
    others = Others()
    others.told = [crew.Call("step", (batch(),))]

    with pytest.raises(TypeError, match="are all ranks of one version"):
        crew.follow(others)


@pytest.mark.slow
def test_two_ranks_train_as_one_does(model, tmp_path):
    """Losses, norms and weights to 1e-5, for each kind of learner; checkpoints of one are checkpoints of the other."""
    (tmp_path / "alone").mkdir()
    alone = {name: ranked.train(name, model, tmp_path / "alone", ALONE) for name in ranked.CASES}
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ranked.__file__)
    root = Path(__file__).parents[3]

    done = subprocess.run(  # noqa: PLW1510 - its code is asserted below, with what it said
        [sys.executable, *command, str(model), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )

    assert done.returncode == 0, done.stderr
    both = json.loads((tmp_path / "metrics.json").read_text())
    assert both.keys() == alone.keys()
    for name, steps in alone.items():
        for one, two in zip(steps, both[name], strict=True):
            assert two == pytest.approx(one, rel=1e-5, abs=1e-5), name
        for file in ("trained", "published"):
            found, wanted = (load_file(tmp_path / where / f"{name}.{file}") for where in ("ranks", "alone"))
            assert found.keys() == wanted.keys()
            again = (tmp_path / "again" / f"{name}.{file}").read_bytes()
            assert again == (tmp_path / "ranks" / f"{name}.{file}").read_bytes(), f"{name}: not the same bytes twice"
            for key, tensor in wanted.items():
                torch.testing.assert_close(found[key], tensor, atol=1e-5, rtol=0, msg=f"{name} {key}")
