"""A run's figures for Weights & Biases, offline: nothing is sent; `wandb sync` uploads the folders when asked to.

All trainers of a run write under one id, each into a folder of its own. Nothing that was written can be taken back, so
what was told is noted before it is written, and a step that is made again is not written again: a trainer that is
killed in between leaves that point out, rather than having it twice. A run that went back to an earlier step goes on
under another id, for its undone steps stay under the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from trainer.config import RunConfig

STEP = "trainer/step"
"""What all figures are drawn over."""


class WandbWriter:
    """Writes offline runs."""

    def __init__(self, config: RunConfig, after: int, branch: int) -> None:
        """Go on with the run's record of this branch."""
        import wandb  # noqa: PLC0415 - most runs have no use for it

        self._id = f"{config.run}.{branch}" if branch else config.run
        self._note = config.directory / "wandb" / "told.json"
        self._told = _read(self._note)
        self._note.parent.mkdir(parents=True, exist_ok=True)
        # A process of a trainer must stay as it is: no streams captured, no repository or machine looked at.
        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
        )
        self._run = wandb.init(
            mode="offline",
            project=config.report.project,
            group=config.run,
            name=self._id if not branch else f"{config.run} from step {after}",
            id=self._id,
            resume="allow",
            dir=str(config.directory),
            config=config.model_dump(mode="json"),
            settings=quiet,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, stream: str, step: int, figures: Mapping[str, float], at_ms: int) -> None:
        """Write figures, unless they were."""
        told = self._told.setdefault(self._id, {})
        if step <= told.get(stream, -1):
            return
        told[stream] = step
        partial = self._note.with_suffix(".partial")
        partial.write_text(json.dumps(self._told))
        partial.replace(self._note)
        self._run.log({STEP: step, **figures})

    def close(self) -> None:
        """Write what is held back."""
        self._run.finish()


def _read(note: Path) -> dict[str, dict[str, int]]:
    """Return id -> stream -> last step told."""
    if not note.exists():
        return {}
    found: dict[str, dict[str, int]] = json.loads(note.read_text())
    return found
