"""Rank 0 leads, the others follow: each call of rank 0's learner is made by all learners, with the same arguments.

The others know no log, no configuration file and no run directory: what they train on, and from which model, is told
to them. Only paths are not the same thing everywhere: all ranks must see the model directory and, to go on with a run,
its checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.control import Canary
from trainer.algorithm_config import AlgorithmConfig
from trainer.config import RunConfig
from trainer.learner import Learner
from trainer.ranks import ALONE, Ranks
from trainer.step_batch import StepBatch
from trainer.step_metrics import StepMetrics


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a learner begins with."""

    model: Path
    """Model directory."""
    algorithm: AlgorithmConfig
    """How to train."""
    seed: int
    """Of the run."""
    threads: int
    """Torch threads of each rank."""
    device: str
    """Torch device; each rank has its own one of that kind."""

    def learner(self, kind: type[Learner], ranks: Ranks) -> Learner:
        """Return the learner of a rank; all have to load at once."""
        return kind(
            self.model,
            self.algorithm,
            seed=self.seed,
            threads=self.threads,
            device=ranks.device(self.device),
            ranks=ranks,
        )


@dataclass(frozen=True)
class Call:
    """One call of a learner."""

    name: str
    arguments: tuple[Any, ...] = ()
    lr_scale: float = 1.0
    """Factor on the learning rate, as rank 0's learner has it."""


class LeadingLearner(Learner):
    """The learner of rank 0: what it is asked for, all ranks do."""

    def step(self, batch: StepBatch, cancelled: Callable[[], bool] = lambda: False) -> StepMetrics:
        """Train on one batch; if it is given up half-way, the others cannot go on either."""
        self._ranks.tell(Call("step", (batch,), self.lr_scale))
        return super().step(batch, cancelled)

    def canary(self) -> Canary:
        """Return what an engine must say to a fixed prompt; each rank has a part of the weights."""
        self._ranks.tell(Call("canary"))
        return super().canary()

    def weights(self) -> bytes:
        """Return the weight file of the model, collected from all ranks."""
        self._ranks.tell(Call("weights"))
        return super().weights()

    def trained_weights(self) -> bytes:
        """Return a weight file for a checkpoint, collected from all ranks."""
        self._ranks.tell(Call("trained_weights"))
        return super().trained_weights()

    def optimizer_bytes(self) -> bytes:
        """Return everything but the weights, collected from all ranks."""
        self._ranks.tell(Call("optimizer_bytes"))
        return super().optimizer_bytes()

    def restore(self, weights: Path, optimizer: bytes) -> None:
        """Let all ranks go on from a checkpoint."""
        self._ranks.tell(Call("restore", (weights, optimizer)))
        super().restore(weights, optimizer)


def load_learner(config: RunConfig, ranks: Ranks) -> Learner:
    """Return the learner of a run, alone or at the head of others."""
    load = Load(
        model=config.model.absolute(),
        algorithm=config.algorithm,
        seed=config.seed,
        threads=config.threads,
        device=config.device,
    )
    ranks.tell(load)
    return load.learner(Learner if ranks is ALONE else LeadingLearner, ranks)


def follow(ranks: Ranks) -> None:
    """Do what rank 0 does until it ends; what a learner returns is rank 0's business alone."""
    learner: Learner | None = None
    for heard in ranks.heard():
        match heard:
            case Load():
                # A run that goes back loads anew; two models would not fit.
                learner = None
                learner = heard.learner(Learner, ranks)
            case Call(name, arguments, lr_scale) if learner is not None:
                learner.lr_scale = lr_scale
                getattr(learner, name)(*arguments)
            case _:
                raise TypeError(f"rank 0 told {heard!r}, which no learner does: are all ranks of one version?")
