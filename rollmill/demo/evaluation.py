"""Measures a policy on hunts: publishes them as a run of its own and grades what comes out of the pipeline.

An evaluation run is never trained on. Before and after training it meets the same hunts with the same seeds. The
interval is Wilson's (1927) at 95 %, over tasks: each hunt is played once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from infra.bus import Bus
from infra.clock import Clock
from infra.wire import Publisher
from producers.collect import outcomes
from producers.generated import GeneratedSource
from producers.publish import ensure_manifest, publish_source
from schemas.control import RunManifest
from schemas.messages import Trajectory
from schemas.outcome import Completed
from schemas.transcript import Sampling

WILSON_Z = 1.959964
"""Quantile of the normal distribution for a 95 % interval."""

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
class Score:
    """What a policy achieved on a suite."""

    success: float
    """Share of hunts that ended with the door open."""
    low: float
    """Lower end of the 95 % interval."""
    high: float
    """Upper end."""
    turns: float
    """Mean turns of the successful hunts; 0 if there is none."""
    valid: float
    """Share of turns whose text was an allowed action."""
    missing: int
    """Hunts without a grade: failures of the system, outside all figures above."""
    trajectories: tuple[Trajectory, ...]
    """All of them, in log order."""


async def evaluate(
    bus: Bus,
    clock: Clock,
    suite: Suite,
    *,
    run: str,
    seed: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Score:
    """Play a suite through the pipeline and return the score.

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
    manifest = await ensure_manifest(bus, clock, Publisher(bus, clock, "producer"), wanted)
    await publish_source(bus, clock, source, wanted)
    found = await outcomes(bus, clock, manifest, suite.episodes, limit_s=LIMIT_S, on_progress=on_progress)
    return score(found)


def score(trajectories: list[Trajectory]) -> Score:
    """Return the score of played hunts; those that the system failed are counted apart."""
    graded = [(t, t.outcome) for t in trajectories if isinstance(t.outcome, Completed)]
    wins = sum(outcome.success for _, outcome in graded)
    low, high = wilson(wins, len(graded))
    turns = [len(t.transcript.turns) for t, outcome in graded if outcome.success == 1 and t.transcript]
    valid = [turn.valid for t, _ in graded if t.transcript for turn in t.transcript.turns]
    return Score(
        success=wins / len(graded) if graded else 0.0,
        low=low,
        high=high,
        turns=sum(turns) / len(turns) if turns else 0.0,
        valid=sum(valid) / len(valid) if valid else 0.0,
        missing=len(trajectories) - len(graded),
        trajectories=tuple(trajectories),
    )


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson, 1927); (0, 1) when nothing was observed."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, WILSON_Z**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = WILSON_Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)
