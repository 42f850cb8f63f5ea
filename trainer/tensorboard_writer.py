"""A run's figures for TensorBoard: `tensorboard --logdir RUN_DIRECTORY/tensorboard`.

A trainer that takes the run over writes into a file of its own, which begins with the step that its curve goes on
behind; what files before it hold of later steps TensorBoard then leaves out. So a step that was made again, or undone,
is one point.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.config import RunConfig


class TensorBoardWriter:
    """Writes event files."""

    def __init__(self, config: RunConfig, after: int, branch: int) -> None:
        """Open a file; a branch needs no other one."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - most runs have no use for it

        folder = str(config.directory / "tensorboard")
        self._writer = SummaryWriter(log_dir=folder, purge_step=after + 1)

    def write(self, stream: str, step: int, figures: Mapping[str, float], at_ms: int) -> None:
        """Write figures; a curve is looked at while it grows, so nothing is held back."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=at_ms / 1000)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
