"""The machinery under the demo: the same services, as processes on Kafka or all in this process in memory.

    async with machine:              # broker, ClickHouse, policy, hosts and stages are up
        await machine.load(weights)
        await machine.train(run_toml)

`processes.py` supervises one process per service; `in_process.py` runs them as tasks on one event loop, where nothing
is durable and nothing can be killed. The story (`flow.py`) is the same on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from infra.bus import Bus
from infra.clock import Clock
from infra.inference.base import PolicyClient

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Conservation:
    """Where the samples of a run went."""

    conserved: bool
    """They add up, and every trained one names its accepted record."""
    admitted: int
    """Samples asked for."""
    counts: dict[str, int]
    """Samples by disposition."""
    violations: tuple[str, ...]
    """What contradicts the rules."""


class Machine(Protocol):
    """What the demo's story needs."""

    name: str
    """`kafka` or `memory`."""
    keeps_tables: bool
    """ClickHouse holds the run, and will after the end."""
    bus: Bus
    clock: Clock

    async def __aenter__(self) -> Self:
        """Start everything but training."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        ...

    async def load(self, directory: Path) -> None:
        """Put weights into the policy."""
        ...

    async def train(self, run_toml: Path) -> None:
        """Start feeder, trainer and the hand-over of weights; returns when they have started."""
        ...

    async def kill(self, service: str) -> float | None:
        """Kill -9 one process and return the seconds until it was back; None where there is none to kill."""
        ...

    async def watch(self) -> None:
        """Return never; raises when a service has failed for good."""
        ...

    async def conservation(self, run: str) -> Conservation:
        """Prove where the samples of a run went."""
        ...


async def unless_broken(machine: Machine, work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
    """Return what the work gives, or raise at once what broke the machine under it."""
    working, watching = asyncio.ensure_future(work), asyncio.create_task(machine.watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        return await working
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def put_weights(client: PolicyClient, directory: Path) -> None:
    """Load weights into an engine as its version 0, between pause and resume."""
    await client.pause("keep")
    try:
        await client.load(directory, 0)
    finally:
        await client.resume()
