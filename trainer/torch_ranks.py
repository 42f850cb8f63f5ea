"""Several ranks: torch's process groups, and FSDP2, which gives each rank a part of all weights and optimizer states.

Collectives only work if every rank makes the same ones in the same order: so all have the same number of passes, of
which the last may be a repetition that counts for nothing. What rank 0 tells is announced in the store that the ranks
met in and then broadcast, so that the others can wait for it as long as trajectories take to come, and yet each of
their waits has a limit. A rank that dies ends the others: their connections to it break, and `torchrun` stops them.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.ranks import Ranks, share

log = logging.getLogger(__name__)

T = TypeVar("T")

COLLECTIVE_LIMIT_S = 1800.0
"""Longest wait of one rank for the others within a step, seconds: they differ by a pass, or by loading a model."""

HEAR_LIMIT_S = 60.0
"""Longest single wait for rank 0's next word, seconds; then the wait is told of and begun again."""

END = "end"
"""What rank 0 leaves in the store when nothing comes any more."""


class TorchRanks(Ranks):
    """One of several ranks."""

    def __init__(self, store: Store, rank: int, count: int, hear_limit_s: float = HEAR_LIMIT_S) -> None:
        """Join the others; returns once all are there.

        Args:
            store: where they meet.
            rank: number of this one.
            count: how many there are.
            hear_limit_s: longest single wait for rank 0's next word, seconds.
        """
        self.rank = rank
        self.count = count
        self._store = store
        self._told = 0
        self._hear_limit = timedelta(seconds=hear_limit_s)
        self._meshes: dict[str, DeviceMesh] = {}
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=COLLECTIVE_LIMIT_S)
        )

    @classmethod
    def started(cls) -> Self:
        """Join the ranks that `torchrun` started with this one."""
        store, rank, count = next(rendezvous("env://"))
        return cls(store, rank, count)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the others; rank 0 lets them go home first, if they wait for a word."""
        if self.rank == 0:
            self._announce(END)
        distributed.destroy_process_group()

    def device(self, name: str) -> str:
        """Return the torch device of this rank: each has an accelerator of its own."""
        if name != "cuda":
            return name
        found = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(found)
        return found

    def share(self, passes: Sequence[T]) -> list[tuple[T, bool]]:
        """Return the passes of this rank, as many as any rank has, and whether each counts or is only company."""
        return share(passes, self.rank, self.count)

    def merge(self, found: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return what all ranks found, where this one has what it found."""
        device = next((tensor.device for tensor in found.values()), None)
        parts: list[dict[int, torch.Tensor]] = [{} for _ in range(self.count)]
        distributed.all_gather_object(parts, {key: tensor.cpu() for key, tensor in found.items()})
        return {key: tensor.to(device) for part in parts for key, tensor in part.items()}

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(total)
        return [float(value) for value in total]

    def shard(self, module: torch.nn.Module) -> None:
        """Give each rank its part: of each layer, which is whole only while it is at work, and of the rest."""
        # Values of a module are never changed in place here, which is what torch warns of.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        mesh = self._mesh(next(module.parameters()).device.type)
        for part in (*_layers(module), module):
            sharded = fully_shard(part, mesh=mesh, reshard_after_forward=True)
            # The loss is divided by all trained tokens already: gradients are summed, where FSDP would take the mean.
            # Gloo can multiply nothing on the way.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(enable=True)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of which each rank has a part; all have to ask."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor, cut like another one; every rank has the whole one."""
        if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
            return tensor
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    def tell(self, call: Any) -> None:
        """Let the others hear something."""
        if self.rank == 0:
            self._announce("call")
            distributed.broadcast_object_list([call], src=0)

    def heard(self) -> Iterator[Any]:
        """Yield what rank 0 tells, until it ends; a wait has a limit, but there may be any number of them."""
        while self._next() != END:
            heard: list[Any] = [None]
            distributed.broadcast_object_list(heard, src=0)
            yield heard[0]

    def _announce(self, word: str) -> None:
        self._store.set(f"told/{self._told}", word)
        self._told += 1

    def _next(self) -> str:
        key = f"told/{self._told}"
        while True:
            try:
                self._store.wait([key], self._hear_limit)
            except distributed.DistStoreError:
                log.info("rank %d waits for rank 0 to say what is trained next", self.rank)
            else:
                self._told += 1
                return bytes(self._store.get(key)).decode()

    def _mesh(self, kind: str) -> DeviceMesh:
        if kind not in self._meshes:
            self._meshes[kind] = init_device_mesh(kind, (self.count,))
        return self._meshes[kind]


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the layers of a model: the members of its outermost lists of modules."""
    for child in module.children():
        yield from child if isinstance(child, torch.nn.ModuleList) else _layers(child)
