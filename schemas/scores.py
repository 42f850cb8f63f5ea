"""What a version of the policy achieved on a suite of tasks; how the figures come about is `trainer/evaluation.py`."""

from __future__ import annotations

from enum import StrEnum

from schemas.message import Part


class Purpose(StrEnum):
    """What a suite is played for."""

    EVALUATION = "evaluation"
    """To know how good a version is; as `[evaluation]` says."""
    GATE = "gate"
    """To know whether training makes sense at all; as the run samples its own tasks."""


class Scores(Part, frozen=True, kw_only=True):
    """The figures of one suite, played once by one version."""

    run: str
    """Run under which it was played; nobody trains on it."""
    tasks: int
    """Tasks of the suite."""
    samples: int
    """Samples asked for."""
    missing: int
    """Samples without a grade that counts, after one retry; outside all figures but the two bounds."""
    mixed: int
    """Of these, samples that other weights had a part in."""
    incomplete: bool
    """Too many are missing for the figures to be compared."""
    success: float
    """Mean over tasks of the mean success of a task's samples."""
    low: float
    """Lower end of its 95 % interval, over tasks."""
    high: float
    """Upper end."""
    worst: float
    """Mean success of all samples, if every missing one had failed."""
    best: float
    """The same, if every missing one had succeeded."""
    reward: float
    """Mean shaped reward of the samples."""
    pass_at: tuple[float, ...]
    """Chance that one of k samples solves a task, for k = 1, 2, ... up to the samples of a task."""
    varied: float
    """Share of the tasks whose samples differ in success."""
    turns: int
    """Turns played."""
    turns_to_success: float
    """Mean turns of the samples that solved their task; 0 if there is none."""
    valid: float
    """Share of the turns whose text was an allowed action."""
    valid_low: float
    """Lower end of its 95 % interval, over turns."""
    valid_high: float
    """Upper end."""
    pass_low: tuple[float, ...] = ()
    """Lower ends of the 95 % intervals of `pass_at`, over tasks; none where an older trainer wrote this down."""
    pass_high: tuple[float, ...] = ()
    """Upper ends."""
