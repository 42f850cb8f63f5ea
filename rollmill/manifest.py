"""What RUN.toml says about a run that all its samples share: written down by its trainer, checked by its feeder."""

from __future__ import annotations

from producers.sources import describe
from schemas.control import RunManifest
from trainer.config import RunConfig
from trainer.curriculum import final_stamp


def manifest_of(run: RunConfig) -> RunManifest:
    """Return the manifest of a run that a trainer paces."""
    tasks = describe(dict(run.tasks))
    # A paced run's groups are stamped by credit; whoever has none, an evaluation, takes what the run trains for.
    final = final_stamp(run.algorithm, run.curriculum)
    return RunManifest(
        run=run.run,
        seed=run.seed,
        samples=run.algorithm.samples,
        budgets=tasks.budgets,
        horizon=final.horizon,
        max_sampled_tokens=tasks.max_sampled_tokens,
        sampling=tasks.sampling(final.temperature),
        paced=True,
    )
