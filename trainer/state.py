"""What a trainer has decided when it writes a checkpoint; the bodies of records stay in the log.

With the log from `assembler.low` on, another trainer goes on exactly here. Weights and optimizer lie beside it in the
checkpoint and are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas.message import Part
from trainer.groups import AssemblerState


class TrainerState(Part, frozen=True, kw_only=True):
    """What is decided at a checkpoint."""

    run: str
    """The run."""
    epoch: int
    """Epoch of the trainer that wrote it."""
    digest: str
    """Batch digest of its last step; empty before the first."""
    decisions: int
    """Offset in `decisions` of the last record that it knows."""
    assembler: AssemblerState
    """Where deciding goes on."""
    guards: Mapping[str, int] = {}
    """Guard -> steps in a row, up to this one, that were beyond its bound; none is 0."""

    @property
    def step(self) -> int:
        """Steps made."""
        return self.assembler.steps
