"""The processes that make a trainer step together, and what each of them needs of the others.

Rank 0 decides; the others do what it does on their share of the passes (`crew.py`). Every rank has the whole batch, so
all of them know the denominator of a mini-batch; what only passes can tell is merged and summed here. This file is the
run of one rank, for which there is nothing to do; `torch_ranks.py` is the run of several.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

T = TypeVar("T")


class Ranks:
    """One rank: alone."""

    rank: int = 0
    """Number of this process; 0 decides."""
    count: int = 1
    """How many there are."""

    def __enter__(self) -> Self:
        """Be one of the ranks inside the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the others; rank 0 lets them go home first, if they wait for a word."""

    def device(self, name: str) -> str:
        """Return the torch device of this rank."""
        return name

    def share(self, passes: Sequence[T]) -> list[tuple[T, bool]]:
        """Return the passes of this rank, as many as any rank has, and whether each counts or is only company."""
        return [(each, True) for each in passes]

    def merge(self, found: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return what all ranks found."""
        return found

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks."""
        return list(values)

    def shard(self, module: torch.nn.Module) -> None:
        """Give each rank its part of a module's weights; gradients are then summed over the ranks."""

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of which each rank has a part."""
        return tensor

    def part(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor, cut like another one."""
        return tensor

    def tell(self, call: Any) -> None:
        """Let the others hear something; only rank 0 does."""

    def heard(self) -> Iterator[Any]:
        """Yield what rank 0 tells, until it ends; the others do what it says."""
        return iter(())


def share(passes: Sequence[T], rank: int, count: int) -> list[tuple[T, bool]]:
    """Return the passes of one of several ranks, as many as any rank has, and whether each counts.

    They come sorted by length, so every so many-th makes the ranks' work alike; where others have one more, the last
    pass is made again and does not count.
    """
    most = -(-len(passes) // count)
    mine = [(each, True) for each in passes[rank::count]]
    return mine + [(last, False) for last in [*passes[-1:]] * (most - len(mine))]


ALONE = Ranks()
"""The run of one rank."""


def ranks_here() -> Ranks:
    """Return the ranks among which this process was started, as `torchrun` tells by the environment."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    # Seconds to import, and most runs have one rank.
    from trainer.torch_ranks import TorchRanks  # noqa: PLC0415

    return TorchRanks.started()
