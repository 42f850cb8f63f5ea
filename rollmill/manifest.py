"""What RUN.toml says about a run that all its samples share: written down by its trainer, checked by its feeder."""

from __future__ import annotations

from producers.sources import describe
from schemas.control import RunManifest
from schemas.transcript import Sampling
from trainer.config import RunConfig


def manifest_of(run: RunConfig) -> RunManifest:
    """Return the manifest of a run that a trainer paces."""
    tasks = describe(dict(run.tasks))
    return RunManifest(
        run=run.run,
        seed=run.seed,
        samples=run.algorithm.samples,
        budgets=tasks.budgets,
        horizon=run.algorithm.horizon,
        max_sampled_tokens=tasks.max_sampled_tokens,
        sampling=Sampling(temperature=run.algorithm.temperature, max_tokens=tasks.max_tokens),
        paced=True,
    )
