"""Programs that draw a run's figures: what they are given, and which there are.

A writer is made and called in one thread, and may raise what it likes: the report leaves it out from then on. Names of
figures are those in `metrics`, with `/` for the first dot and before each label, which is how both programs make
sections: `trainer/reward_component_mean/done`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol

from infra.errors import ConfigError
from schemas.telemetry import MetricPoint
from trainer.config import RunConfig, WriterName
from trainer.tensorboard_writer import TensorBoardWriter
from trainer.wandb_writer import WandbWriter


class Writer(Protocol):
    """One program's record of a run."""

    def write(self, stream: str, step: int, figures: Mapping[str, float], at_ms: int) -> None:
        """Write figures of a step.

        Args:
            stream: what they belong to: `step`, or the purpose of an evaluation.
            step: the step.
            figures: name -> value.
            at_ms: when, milliseconds since the epoch.
        """
        ...

    def close(self) -> None:
        """Write what is still held back."""
        ...


Opening = Callable[[RunConfig, int, int], Writer]
"""(run, step behind which its curve goes on, how often it went back) -> its writer."""

WRITERS: Mapping[WriterName, tuple[str, Opening]] = {
    WriterName.TENSORBOARD: ("tensorboard", TensorBoardWriter),
    WriterName.WANDB: ("wandb", WandbWriter),
}
"""Name -> the package it needs, which is also the name of our extra; how it is opened."""


def require(names: Sequence[WriterName], writers: Mapping[WriterName, tuple[str, Opening]] = WRITERS) -> None:
    """Raise ConfigError if a package is missing."""
    for name in names:
        package, _ = writers[name]
        if find_spec(package) is None:
            raise ConfigError(
                f"report.writers names {name.value!r}, and the package {package!r} is not installed: "
                f"pip install 'rollmill[{package}]', or leave it out"
            )


def figures(points: Sequence[MetricPoint]) -> dict[str, float]:
    """Return points of one step by the names that writers give them."""
    return {"/".join((p.name.replace(".", "/", 1), *p.labels.values())): p.value for p in points}
