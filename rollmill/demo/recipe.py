"""Every number of the demo, found by measuring over several seeds; none of them is read from the outcome.

A number that a run needs goes into its RUN.toml from here, so that the run could be trained without the demo.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmill.demo.evaluation import Suite
from trainer.sft import SftConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the demo does."""

    size: int = 5
    """Rows and columns of the training grid."""
    turns: int = 14
    """Most turns of a training hunt; the mean optimum is about 8.7."""
    sft: SftConfig = field(default_factory=lambda: SftConfig(steps=80, batch=8, lr=3e-3))
    """The warm start."""
    groups: int = 8
    """Groups of one trainer step."""
    samples: int = 8
    """Siblings of a group."""
    max_lag: int = 1
    """Steps that sampling runs ahead of training."""
    lr: float = 3e-4
    """Learning rate of the trainer."""
    min_steps: int = 10
    """Steps made at least."""
    max_steps: int = 40
    """Steps made at most."""
    stop_success: float = 0.9
    """Training ends when the success of the last 64 admitted groups reaches this."""
    time_limit_s: float = 240.0
    """Training ends after this long, seconds."""
    kill_run_after: int = 3
    """A RUN worker is killed after this trainer step."""
    kill_trainer_after: int = 6
    """The trainer is killed after the checkpoint of this step."""
    format_floor: float = 0.9
    """Share of valid turns that the warm start must reach before training makes sense."""
    success_floor: float = 0.05
    """Success that the warm start must reach: below it hardly any group has variance."""
    shuffled: bool = False
    """Train the control: siblings trade their rewards."""

    def suites(self) -> tuple[Suite, Suite, Suite]:
        """Return what is measured before and after: sampled, greedy, and a larger grid that is never trained on."""
        return (
            Suite(name="sampled", size=self.size, turns=self.turns, temperature=1.0, episodes=256),
            Suite(name="greedy", size=self.size, turns=self.turns, temperature=0.0, episodes=128),
            Suite(name="7x7", size=7, turns=20, temperature=1.0, episodes=128),
        )

    def run_toml(self, run: str, seed: int, model: Path, directory: Path) -> dict[str, Any]:
        """Return the run's configuration as RUN.toml holds it."""
        return {
            "run": run,
            "seed": seed,
            "model": str(model),
            "directory": str(directory),
            "threads": 1,
            "algorithm": {
                "groups": self.groups,
                "samples": self.samples,
                "max_lag": self.max_lag,
                "epochs": 2,
                "minibatches": 2,
                "lr": self.lr,
                "horizon": self.turns,
                "temperature": 1.0,
                **({"shuffle_seed": seed} if self.shuffled else {}),
            },
            "stop": {
                "max_steps": self.max_steps,
                "min_steps": self.min_steps,
                "success": self.stop_success,
                "success_groups": 64,
                "time_limit_s": self.time_limit_s,
            },
            "checkpoints": {"every": 1},
            "tasks": {
                "family": "keydoor",
                "payload": {"size": self.size, "turns": self.turns, "split": "train"},
                "max_tokens": 8,
                "max_sampled_tokens": 8 * self.turns,
            },
        }
