"""Measures a policy on hunts, before and after training, with the same hunts and the same seeds.

A suite is played as any evaluation is (`rollmill/evaluator.py`), whatever version the policy serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.bus import Bus
from infra.clock import Clock
from infra.errors import WaitTimeout
from infra.inference.base import Weights
from producers.generated import GeneratedSource
from rollmill.evaluator import play
from schemas.control import RunManifest
from schemas.messages import Trajectory
from schemas.scores import Scores
from schemas.transcript import Sampling
from trainer.evaluation import scores

LIMIT_S = 180.0
"""Longest wait for an evaluation, seconds."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A set of hunts and how they are played."""

    name: str
    """Part of the run's name."""
    size: int
    """Rows and columns of the grid."""
    turns: int
    """Most turns."""
    temperature: float
    """1 samples, 0 is greedy."""
    episodes: int
    """Number of hunts."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a policy did on a suite."""

    scores: Scores
    """The figures."""
    trajectories: Sequence[Trajectory]
    """What they were made from."""


async def measure(
    bus: Bus,
    clock: Clock,
    suite: Suite,
    *,
    run: str,
    seed: int,
    weights: Weights | None = None,
    limit_s: float = LIMIT_S,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Measured:
    """Play a suite through the pipeline.

    Args:
        bus: the log.
        clock: for the limit.
        suite: what is played.
        run: the run under which it is played.
        seed: of the run.
        weights: the only ones that count; whichever are served unless given.
        limit_s: longest wait, seconds.
        on_progress: told how many episodes have ended.

    Raises:
        infra.errors.WaitTimeout: the pipeline did not finish in time.
    """
    payload = {"size": suite.size, "turns": suite.turns, "split": "held_out"}
    source = GeneratedSource("keydoor", payload, name=suite.name, count=suite.episodes)
    wanted = RunManifest(
        run=run,
        seed=seed,
        samples=1,
        horizon=suite.turns,
        sampling=Sampling(temperature=suite.temperature, max_tokens=8),
        max_sampled_tokens=8 * suite.turns,
    )
    ended = await play(bus, clock, source, wanted, weights=weights, limit_s=limit_s, on_progress=on_progress)
    found = [one.trajectory for one in ended if one.trajectory is not None]
    if len(found) < len(ended):
        raise WaitTimeout(
            f"waited {limit_s:g} s for {len(ended)} outcomes of run {run!r}, {len(found)} came; `rollmill status` "
            f"shows which stage is behind"
        )
    return Measured(scores=scores(run, [one.played for one in ended]), trajectories=found)
