"""Whether a warm start is fit for reinforcement learning: judged from one probe before the first step. Pure.

A policy whose actions are mostly not even allowed learns from noise, and one whose siblings all end alike learns
nothing; both cost as much as a run that works. The probe samples held-out tasks as the run will sample its own:
temperature, horizon and siblings are those of training.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from infra.errors import RollmillError
from schemas.scores import Scores
from trainer.algorithm_config import AlgorithmConfig, Filter

log = logging.getLogger(__name__)

FEWEST_TURNS = 256
"""Turns that a probe must have."""

ALLOWED = 0.8
"""Share of turns with an allowed action that the lower end of its interval must reach."""

FEW_MIXED = 0.05
"""Share of groups that differ in success below which a run will mostly sample in vain."""


class GateRefused(RollmillError):
    """The model that a run begins with is not fit to be trained."""

    exit_code: ClassVar[int] = 3


def pass_gate(run: str, probe: Scores, algorithm: AlgorithmConfig, *, force: bool) -> None:
    """Return if a run may begin; say what is to be expected of it.

    Args:
        run: the run.
        probe: what the model that it begins with achieved.
        algorithm: how it will be trained.
        force: begin whatever the probe says.

    Raises:
        GateRefused: it may not.
    """
    unfit = complaint(probe)
    if unfit and not force:
        raise GateRefused(
            f"run {run!r} does not begin: {unfit} The probe is recorded: `--resume --force` begins all the same; "
            f"a model with a better warm start wants a new run name"
        )
    if unfit:
        log.warning("run %s begins by force: %s", run, unfit)
    log.info("run %s: %.1f %% of %d groups differ in success", run, 100 * probe.varied, probe.tasks)
    if algorithm.filter is Filter.SUCCESS and probe.varied < FEW_MIXED:
        log.warning(
            "run %s: only %.1f %% of the probe's %d groups differ in success (at least %.0f %% are wanted), the others "
            "would be sampled in vain: success is %.3f. Take easier or harder tasks, more `algorithm.samples`, or "
            '`algorithm.filter = "reward"`',
            *(run, 100 * probe.varied, probe.tasks, 100 * FEW_MIXED, probe.success),
        )


def complaint(probe: Scores) -> str:
    """Return what makes a model unfit, with the figure, its bound and what to do; empty if nothing does."""
    if probe.turns < FEWEST_TURNS:
        return (
            f"the probe {probe.run} had {probe.turns} turns of {probe.tasks} tasks, {FEWEST_TURNS} are needed to "
            f"judge: give [evaluation] more tasks ({probe.missing} of {probe.samples} samples are missing)."
        )
    if probe.valid_low < ALLOWED:
        return (
            f"in the probe {probe.run} {probe.valid:.1%} of {probe.turns} turns were allowed actions, so at least "
            f"{probe.valid_low:.1%} are (95 %), and {ALLOWED:.0%} are needed. Warm-start the model further by "
            f"supervised training on successful trajectories, or check prompt, chat template and `max_tokens`."
        )
    return ""
