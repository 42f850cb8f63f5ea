"""A few trainer steps by one rank or several, and what they came to; `torchrun` starts several with this file."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.unit.trainer.synthetic_batch import batch
from trainer.algorithm_config import AlgorithmConfig
from trainer.crew import LeadingLearner, Load, follow
from trainer.learner import Learner
from trainer.ranks import ALONE, ranks_here

ALGORITHM = {"groups": 4, "minibatches": 2, "epochs": 2, "lr": 1e-3, "micro_tokens": 20}

CASES = {
    "whole": {"kl": 0.1, "ref_reset": 3, "entropy_floor": 6.0},
    "sample level": {"level": "sample", "activation_checkpointing": True, "minibatches": 4, "micro_tokens": 1000},
    "value head": {"estimator": "gae", "weight_decay": 0.1},
    "adapters": {"lora": {"rank": 4, "alpha": 8}, "kl": 0.1, "ref_reset": 2, "estimator": "gae", "lr": 1e-2},
}
"""Name -> what is set; the passes of a mini-batch are often odd in number, or fewer than ranks."""


def train(name, model, directory, ranks):
    """Make two steps, go on from their checkpoint with another learner, make two more; return the figures of all."""
    load = Load(model=model, algorithm=AlgorithmConfig(**{**ALGORITHM, **CASES[name]}), seed=7, threads=1, device="cpu")
    kind = Learner if ranks is ALONE else LeadingLearner
    ranks.tell(load)
    first = load.learner(kind, ranks)
    metrics = [first.step(batch(number)) for number in (1, 2)]
    kept = directory / f"{name}.kept"
    kept.write_bytes(first.trained_weights())
    optimizer = first.optimizer_bytes()
    ranks.tell(load)
    second = load.learner(kind, ranks)
    second.restore(kept, optimizer)
    metrics += [second.step(batch(number)) for number in (3, 4)]
    (directory / f"{name}.trained").write_bytes(second.trained_weights())
    (directory / f"{name}.published").write_bytes(second.weights())
    found = [{name: value for name, value in asdict(each).items() if value is not None} for each in metrics]
    return [*found, {str(place): float(value) for place, value in enumerate(second.canary().expected)}]


def main(model, directory):
    """Train each case as one of several ranks."""
    with ranks_here() as ranks:
        if ranks.rank:
            follow(ranks)
            return
        for where in ("ranks", "again"):
            (directory / where).mkdir()
            found = {name: train(name, model, directory / where, ranks) for name in CASES}
        (directory / "metrics.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
